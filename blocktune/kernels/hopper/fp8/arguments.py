"""What the warps of the 8-bit Hopper forward get by name: memory and barriers, scales, and what is known at compile
time."""

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Shared memory of a block."""

    q: Any
    """A tile of queries for each consumer."""
    k: Any
    v: Any
    """A tile of keys and one of transposed values for each stage."""
    o: Any
    """A consumer's output on its way out, or its sums."""
    q_full: Any
    q_empty: Any
    """A barrier for each consumer."""
    full: Any
    """A barrier for each stage."""
    raw_full: Any
    """Another one, of values that are still to be transposed. None: they come transposed."""
    ring: Any
    """Numbers of tiles, a `TileRing`."""
    shares: Any
    """What probabilities are multiplied with to add them up. None: threads add them."""


class Scales(NamedTuple):
    """The softmax scale times log2(e); and what the numbers of a head are multiplied with, None for 1, with the strides
    of a batch entry (b) and a head (h)."""

    log2: Any
    q: Any
    k: Any
    v: Any
    qb: Any
    qh: Any
    kb: Any
    kh: Any
    vb: Any
    vh: Any


class Options(NamedTuple):
    """Constants of `flash_fwd_fp8_kernel` that its warps know."""

    BLOCK_N: Any
    STAGES: Any
    CONSUMERS: Any
    RAGGED: Any
    RIGHT: Any
    ALIGNED: Any
    Q_REGISTERS: Any
    ONE_STRETCH: Any
