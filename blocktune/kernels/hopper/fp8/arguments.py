"""What the warps of the 8-bit Hopper forward get besides what the 16-bit one names: scales, and its own constants."""

from typing import Any, NamedTuple


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
