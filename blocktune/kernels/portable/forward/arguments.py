"""What the device functions of the portable kernels get, by name: strides, sequences, keys, scores and constants."""

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """The strides of a tensor by batch entry or page, head and row, in elements."""

    batch: Any
    head: Any
    row: Any


class SequenceBounds(NamedTuple):
    """A sequence: its lengths, and the keys i + diagonal - left .. i + diagonal + right that query i of it sees.

    In decoding the options say which of these bounds count, elsewhere a negative one is none. None: of no use to the
    kernel at hand.
    """

    seqlen_q: Any
    seqlen_k: Any
    diagonal: Any
    left: Any = None
    right: Any = None


class Matrix(NamedTuple):
    """The rows of a matrix in memory: the pointer to the first, the stride of a row, and how many there are."""

    base: Any
    stride: Any
    rows: Any


class Keys(NamedTuple):
    """Keys and values of a head, each a `Matrix`; or (TMA) descriptors of whole tensors as the bases of both, and the
    head's place in them. In pages both begin at the head's row 0 of page 0: the strides of a page, and the sequence's
    line of the table of pages."""

    k: Any
    v: Any
    batch: Any = None
    head: Any = None
    k_page: Any = None
    v_page: Any = None
    table: Any = None


class Queries(NamedTuple):
    """What a pass over keys walks along: queries and output gradients, each a `Matrix`, and pointers to the first
    log-sum-exp and delta, float32."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


class QueryTile(NamedTuple):
    """What a pass over queries owns: rows of queries and output gradients, and their numbers [BLOCK_M]: what scores are
    compared with, and delta."""

    q: Any
    dout: Any
    statistics: Any
    delta: Any


class QuerySums(NamedTuple):
    """Where a pass over keys adds up dq, float32: a pointer to row `row` of head number `head`, or for the copy engine
    (TMA) a descriptor of [heads, rows, HEAD_DIM], which leaves out what is outside the tensor."""

    sums: Any
    head: Any
    row: Any


class SoftmaxState(NamedTuple):
    """What rows have found: acc [BLOCK_M, WIDTH_V], not yet divided, sums l_i and maxima m_i [BLOCK_M]."""

    acc: Any
    l_i: Any
    m_i: Any


class BlockList(NamedTuple):
    """The active blocks of a row of a mask: a pointer to the first of `BlockLists.indices`, and log2 of the tiles of a
    block."""

    indices: Any
    shift: Any


class Scoring(NamedTuple):
    """What makes a score of a product, in natural units; the mask: element (0, 0) of this batch and head, with strides
    of (query, key) in elements, 0 where broadcast. What an option leaves out is not read."""

    scale: Any
    softcap: Any
    slope: Any
    mask: Any
    mask_row: Any
    mask_column: Any


class Dropout(NamedTuple):
    """The head's number among all, 1 minus dropout_p, and the words of `keep_arguments` in kernels/values/dropout.py:
    int32 with the bits of a uint32."""

    batch_head: Any
    kept_share: Any
    seed_lo: Any
    seed_hi: Any
    offset: Any
    threshold: Any


class Options(NamedTuple):
    """The constants of the forward and backward kernels; a default says that there is no such thing.

    WIDTH, WIDTH_V: columns of tiles, which are filled up with zeros. RAGGED: tiles may reach beyond the last key, or in
    a backward beyond the last query. PRECISION: `input_precision` of products. BLOCK_M, BLOCK_N: queries and keys of a
    tile. SCHEDULE: 0, or the scores of a tile are computed ahead, with 2 against a fixed reference. TMA: keys and
    values are read through descriptors. UPPER_LEFT: the diagonal of a packed sequence begins at its first key,
    otherwise it ends at the last one. MASK: 1 boolean (as uint8, 0 where the pair takes no part), 2 additive (any float
    type). BIASED: a score is more than a product, by SOFTCAP, ALIBI or an additive MASK. SUMS: the pass over keys adds
    up dq, 1 by atomic additions, 2 by the copy engine. CACHED: keys are those of a cache, which says their number.
    PAGE_SIZE: keys of a page of it, 0 where an entry's keys are next to each other.
    """

    HEAD_DIM: int
    HEAD_DIM_V: int
    WIDTH: int
    WIDTH_V: int
    CAUSAL: bool
    RAGGED: bool
    PRECISION: str
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    SCHEDULE: int = 0
    TMA: bool = False
    UPPER_LEFT: bool = False
    WINDOW: bool = False
    SOFTCAP: bool = False
    ALIBI: bool = False
    MASK: int = 0
    BIASED: bool = False
    DROPOUT: bool = False
    PACKED: bool = False
    SUMS: int = 0
    CACHED: bool = False
    PAGE_SIZE: int = 0
