"""What the warps of the Hopper forwards get, by name: memory and barriers, sizes, and what is known at compile time."""

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Shared memory of a block. None: of no use to the kernel at hand."""

    q: Any
    """A tile of queries for each consumer."""
    k: Any
    v: Any
    """A tile of keys and one of values for each stage."""
    o: Any
    """A consumer's output on its way out."""
    q_full: Any
    q_empty: Any
    """A barrier for each consumer."""
    full: Any
    k_empty: Any
    v_empty: Any
    """A barrier for each stage. k_empty is of the whole slot, unless K and V are given back apart."""
    ring: Any
    """Numbers of tiles, a `TileRing`."""
    places: Any = None
    """Of a block's keys, as kernels/hopper/forward/lines.py multiplies them."""


class Sizes(NamedTuple):
    """The integers of a launch; right and left: bounds of the keys that query 0 sees."""

    seqlen_q: Any
    seqlen_k: Any
    num_heads: Any
    group_size: Any
    batch_heads: Any
    head_group: Any
    right: Any
    left: Any


class Biases(NamedTuple):
    """What makes a score more than a product, and what drops probabilities. None: there is none.

    slopes: float32, strides of (batch, head). diagonal: the key that query 0 stands at. unit: what a score counts in
    natural units. mask: as mask_pass.py writes it, strides of (batch, head, 64 queries) in tiles. kept_share: 1 minus
    dropout_p, then the words of `keep_arguments` in kernels/values/dropout.py.
    """

    slopes: Any
    slope_batch: Any
    slope_head: Any
    diagonal: Any
    unit: Any
    mask: Any
    mask_batch: Any
    mask_head: Any
    mask_tile: Any
    kept_share: Any
    seed_lo: Any
    seed_hi: Any
    offset: Any
    threshold: Any


class Options(NamedTuple):
    """Constants of `flash_fwd_hopper_kernel` that its warps know."""

    BLOCK_N: Any
    STAGES: Any
    CONSUMERS: Any
    QK_PANELS: Any
    V_PANELS: Any
    RAGGED: Any
    RIGHT: Any
    LEFT: Any
    LOWER_RIGHT: Any
    ALIGNED: Any
    SOFTCAP: Any
    ALIBI: Any
    LINES: Any
    MASK: Any
    DROPOUT: Any
    SPLIT_RELEASE: Any
    ONE_RING: Any
    EARLY_P: Any
    KEEP_P: Any
    Q_REGISTERS: Any
    FREE_Q: Any
    SHARE_O: Any
    O_SLOTS: Any


class ShortOptions(NamedTuple):
    """Constants of `flash_fwd_hopper_short_kernel` that its warps know."""

    BLOCK_N: Any
    STAGES: Any
    CONSUMERS: Any
    RAGGED: Any
    RIGHT: Any
    ALIGNED: Any
    SPLIT_RELEASE: Any
    EARLY_P: Any
    KEEP_P: Any
    O_SLOTS: Any
    JOINED: Any
