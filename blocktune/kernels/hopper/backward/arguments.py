"""What the warps of the Hopper backwards get, by name: memory and barriers, sizes, and constants."""

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Shared memory of a block of `flash_bwd_hopper_kernel`."""

    k: Any
    v: Any
    """The block's keys and values."""
    q: Any
    do: Any
    lse: Any
    delta: Any
    """Queries, gradients of the output and statistics of each stage."""
    ds: Any
    """dS of two steps."""
    dq: Any
    """A part of dQ of each warpgroup, on its way to the sums; of one step or of two where other warps add it."""
    q_full: Any
    do_full: Any
    empty: Any
    """A barrier for each stage: q_full is of q and lse, do_full of do and delta, empty of all of them."""
    ds_full: Any
    """A barrier for each dS."""
    dq_full: Any
    dq_empty: Any
    """Barriers of dQ that other warps add (adders.py); else None."""


class WideMemory(NamedTuple):
    """Shared memory of a block of `flash_bwd_hopper_wide_kernel`, whose tiles are panels of 64 columns."""

    k: Any
    v: Any
    """The block's keys and values."""
    q: Any
    do: Any
    lse: Any
    delta: Any
    """Queries, gradients of the output and statistics of each stage."""
    p: Any
    ds: Any
    """What the warpgroups hand each other: float32 P, and dS; of halves.py dS of two steps."""
    dq: Any
    """Room of each warpgroup for a panel of dQ on its way to the sums."""
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    """A barrier for each stage: of q and lse, and of do and delta."""
    exchanged: Any
    """A barrier for P and one for dS; of halves.py for dS of either step."""


class Steps(NamedTuple):
    """What a warpgroup needs in every step. dq_sums: the sums of dq, where registers are added to them, else None.
    cap_in: of a soft cap, else None. biases: `KeyBiases` of the launch; head: what `biases_of_head` makes of them."""

    dq_desc: Any
    dq_sums: Any
    memory: Any
    scale_log2: Any
    cap_in: Any
    biases: Any
    head: Any


class Ends(NamedTuple):
    """What a warpgroup needs where tiles begin and end: barriers of K and V, and the `TileRing`."""

    kv_full: Any
    kv_empty: Any
    ring: Any


class Sizes(NamedTuple):
    """The integers of a launch, and where packed sequences begin; what the form has no use for is None."""

    seqlen_q: Any
    seqlen_k: Any
    num_heads_kv: Any
    group_size: Any
    batch_heads: Any
    head_group: Any
    rows: Any
    upper: Any
    lower: Any
    cu_q: Any
    cu_k: Any
    lists: Any = None
    stride_lb: Any = None
    stride_lh: Any = None
    stride_ln: Any = None
    """Lists of blocks of queries (`walk_lists`), and their strides by batch entry, query head and tile of keys."""


class Bounds(NamedTuple):
    """Of a sequence: query i sees keys i + lower .. i + upper; and how many queries and keys it has."""

    upper: Any
    lower: Any
    queries: Any
    keys: Any


class KeyTile(NamedTuple):
    """A tile of keys of heads wider than 128: its first key, batch * num_heads_kv + head and both of them alone, where
    its sequence begins, and the blocks of queries that see it, from first to end, without masks from low to high;
    whether the walk along them goes back, if that differs from tile to tile (`walks_back`)."""

    n0: Any
    batch_head: Any
    entry: Any
    head: Any
    begin_q: Any
    begin_k: Any
    first: Any
    low: Any
    high: Any
    end: Any
    back: Any
    bounds: Any


class Options(NamedTuple):
    """Constants of `flash_bwd_hopper_kernel` that its warps know."""

    STAGES: Any
    CAUSAL: Any
    GROUPED: Any
    DEFER: Any
    FOLD_LSE: Any
    FOLD_DELTA: Any
    NAMED: Any
    PERSISTENT: Any
    FORM: Any
    PARTS: Any
    AHEAD: Any
    ALIBI: Any
    MASK_CODE: Any
    DROPOUT: Any


class WideOptions(NamedTuple):
    """Constants of `flash_bwd_hopper_wide_kernel` that its warps know."""

    STAGES: Any
    DO_STAGES: Any
    CAUSAL: Any
    FOLD_LSE: Any
    FOLD_DELTA: Any
    NAMED: Any
    PERSISTENT: Any
    FORM: Any
    ALIBI: Any
    MASK_CODE: Any
    DROPOUT: Any
