"""What the device functions of decoding on Hopper get, by name: strides, rows, results and constants."""

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """The strides of a tensor by batch entry or page, head and row."""

    batch: Any
    head: Any
    row: Any


class Sizes(NamedTuple):
    """The integers of a launch; total_rows: those of all batch entries and heads."""

    num_heads: Any
    group_size: Any
    total_rows: Any
    seqlen_q: Any
    seqlen_k: Any


class Share(NamedTuple):
    """The tiles first .. stop - 1 of a block's share of the keys, and where the keys end that any row sees."""

    first: Any
    stop: Any
    stop_key: Any


class Rows(NamedTuple):
    """The packed rows of a block: how many there are, the place of the first among all, and the queries of a head."""

    count: Any
    place: Any
    seqlen_q: Any


class Output(NamedTuple):
    """Where results go: the output of the first query head of a group, its strides, and the log-sum-exp or None; and
    the sinks of the rows or None."""

    out: Any
    strides: Any
    lse: Any
    sinks: Any


class Found(NamedTuple):
    """A part of the softmax of rows: o [rows, WIDTH] = sum 2^(s - m) v, the maxima m [rows] in base 2, and l [rows] =
    sum 2^(s - m)."""

    o: Any
    m: Any
    l: Any


class Options(NamedTuple):
    """The constants of `flash_decode_hopper_kernel` and `flash_decode8_hopper_kernel`."""

    HEAD_DIM: int
    HEAD_DIM_V: int
    WIDTH: int
    WIDTH_V: int
    """Columns of tiles, which are filled up with zeros."""
    PAGE_SIZE: int
    """Keys of a page; 0 without pages."""
    CAUSAL: bool
    FROM_START: bool
    """Query i sees the keys up to i + d, where d is 0 (FROM_START) or length - seqlen_q."""
    ROWS: int
    """Packed rows of a tile."""
    BLOCK_N: int
    """Keys of a tile."""
    SPLITS: int
    """Shares of the keys."""
    STREAM: bool
    """Keys and values leave the L2 cache first."""
    OF_TOKENS: bool
    """Every row of a key head has scales of its own."""
