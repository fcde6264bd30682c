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
    """The constants of the kernels.

    Query i sees the keys i + left .. i + right (RIGHT, LEFT: where there are such bounds; LOWER_RIGHT: of each packed
    sequence, plus its seqlen_k - seqlen_q).
    """

    BLOCK_M: int
    """Queries of a step."""
    BLOCK_N: int
    """Keys of a block."""
    STAGES: int
    DO_STAGES: int
    """Slots of Q and of dO."""
    PANELS: int
    V_PANELS: int
    """Panels of 64 columns of Q and K, and of V and dO, of heads wider than 128; others have one of all columns."""
    CAUSAL: bool
    """Tiles of a diagonal differ in length."""
    GENERAL: bool
    """Lengths need not be multiples of 128, bounds are RIGHT and LEFT, and there may be features. Otherwise nothing is
    masked but the diagonal of equal lengths (CAUSAL)."""
    RIGHT: bool
    LEFT: bool
    LOWER_RIGHT: bool
    RAGGED_K: bool
    RAGGED_Q: bool
    """The last block of keys or of queries may be a part of one."""
    PACKED: bool
    """Sequences are packed."""
    LISTED: bool
    """Lists name the blocks of queries that see a tile of keys (kernels/hopper/sparse/lists.py)."""
    SHORT: bool
    """Tiles are so short that it pays to end one while the next one begins."""
    TOGETHER: int
    """How many tiles of a head begin with the same queries where walks begin apart; otherwise 0."""
    ORDERED: bool
    """dQ is added up in a fixed order."""
    BACK: bool
    """Then walks begin with the last queries, and the tiles of the first keys add first (turns.py)."""
    BOTH_WAYS: bool
    """Walks go back for the last heads of a launch alone, whose longest tiles come first (turns.py)."""
    SOFTCAP: bool
    """Scores are tanh(cap_in * q k^T), and scale_log2 is the cap times log2(e)."""
    ALIBI: int
    """1 where no query sees a key right of its place, 2 where one does, 0 without ALiBi."""
    MASK: int
    """1 boolean, 2 additive, 0 without a mask tensor."""
    MASK_AHEAD: bool
    """The values of an additive mask are loaded a step ahead."""
    DROPOUT: bool
    DEFER: bool
    """dQ of a step is computed in the next one."""
    FOLD_LSE: bool
    FOLD_DELTA: bool
    """The statistics of a query are the initial accumulators of S and of dP."""
    NAMED_EXCHANGE: bool
    NAMED_RELEASE: bool
    """The warpgroups exchange dS, and stages are given back, at the hardware's named barriers."""
    PERSISTENT: bool
    """Blocks take tiles from a counter."""
    PARTS: int
    """In how many parts the query heads that share keys are walked along. Above 1 the sizes are those of parts, each of
    which leaves float32 gradients of its own."""
    GROUPED: bool
    """A part has several query heads."""
    AHEAD: bool
    """Scores run ahead (ahead.py)."""
    ADDERS: bool
    """Warps of their own add dQ (adders.py); of heads wider than 128 they let the warpgroups add it."""
    DQ_SLOTS: int
    """Of how many steps there is dQ in shared memory."""
