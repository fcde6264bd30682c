"""What the warps of the Hopper backwards get, by name: tensors and memory, sizes, tiles of keys, and constants."""

from typing import Any, NamedTuple


class Tensors(NamedTuple):
    """The tensors of a launch: descriptors, and pointers, None for what it has not."""

    q: Any
    k: Any
    v: Any
    do: Any
    dq: Any
    """The float32 sums of dq, in the order of wgmma's accumulator registers."""
    dk: Any
    dv: Any
    lse: Any
    delta: Any
    """What scores in base 2 are compared with, and rowsum(out * dout), of the workspace's rows."""
    counter: Any
    """An int32 zero."""
    dq_sums: Any
    """The sums of dq, where registers are added to them."""
    cu_q: Any
    cu_k: Any
    """int32 [batch + 1] of packed sequences."""
    turns: Any
    """In a fixed order: int32 zeros, one for every 64 rows of the workspace."""
    lists: Any
    """Under a block mask: which blocks of queries see a tile of keys (kernels/hopper/sparse/lists.py)."""


class Memory(NamedTuple):
    """Shared memory of a block, None for what the kernel has no use for. Tiles of heads wider than 128 are panels of 64
    columns."""

    k: Any
    v: Any
    """The block's keys and values."""
    q: Any
    do: Any
    lse: Any
    delta: Any
    """Queries, gradients of the output and statistics of each slot."""
    p: Any
    """P on its way from one warpgroup to the other, in float32."""
    ds: Any
    """dS of two steps; of one where the warpgroups share products."""
    dq: Any
    """A part of dQ of each warpgroup on its way to the sums, of one step or of two (DQ_SLOTS)."""
    kv_full: Any
    kv_empty: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    """A barrier for each slot: of q and lse, and of do and delta. do_empty is q_empty where both are given back
    together."""
    exchanged: Any
    """A barrier for dS of either step; where the warpgroups share products, one for P and one for dS."""
    dq_full: Any
    dq_empty: Any
    """Barriers of dQ that other warps add (adders.py)."""
    ring: Any
    """Numbers of tiles, a `TileRing`."""


class Sizes(NamedTuple):
    """The integers of a launch; right and left: bounds of the keys that query 0 sees. The plain form has no use for
    those from `rows` on, which are None there."""

    seqlen_q: Any
    seqlen_k: Any
    num_heads_kv: Any
    group_size: Any
    batch_heads: Any
    """batch * num_heads_kv."""
    head_group: Any
    """Heads whose tiles are taken in turns."""
    rows: Any
    """Of a head (packed), or of a head and batch entry, in the workspace."""
    right: Any
    left: Any
    list_batch: Any
    list_head: Any
    list_tile: Any
    """Strides of the lists by batch entry, query head and tile of keys."""


class Scaling(NamedTuple):
    """The softmax scale, also times log2(e), and what a soft cap bends by."""

    scale: Any
    scale_log2: Any
    cap_in: Any


class Inputs(NamedTuple):
    """What a warpgroup that computes has of a launch: `Tensors`, `Memory`, `Scaling` and `KeyBiases`."""

    tensors: Any
    memory: Any
    scaling: Any
    biases: Any


class Walk(NamedTuple):
    """Blocks of queries that see a tile of keys, at the places first .. end; from low to high all of them do.

    back: whether the walk goes back, if that differs from tile to tile (`walks_back`). entries: the list that names the
    blocks, if any, otherwise 0.
    """

    first: Any
    low: Any
    high: Any
    end: Any
    back: Any
    entries: Any


class KeyTile(NamedTuple):
    """A tile of keys.

    n: its number in a head; n0: its first key. batch_head: batch * num_heads_kv + head. sequence: `SequenceBounds`.
    walk: what it is walked along; seen: whether any query sees its keys.
    """

    n: Any
    n0: Any
    batch_head: Any
    batch: Any
    head: Any
    sequence: Any
    walk: Any
    seen: Any


class Head(NamedTuple):
    """A query head that reads a tile of keys: where its rows begin in the workspace, its walk, and its biases
    (`HeadBiases`)."""

    row: Any
    walk: Any
    biases: Any


class Pairs(NamedTuple):
    """What a step needs to know of its pairs: of a mask tensor, and which of them dropout keeps."""

    mask: Any
    kept: Any


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
    TAIL: int
    """Columns beyond 64 that products take of heads of 65 to 96 columns, whose tiles have 128; 0 of all others."""
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
    which leaves gradients of its own: in float32, or in 16 bits of heads wider than 128."""
    GROUPED: bool
    """A part has several query heads, or heads are wider than 128."""
    AHEAD: bool
    """Scores run ahead (ahead.py)."""
    ADDERS: bool
    """Warps of their own add dQ of head_dim up to 128 (adders.py)."""
    DQ_SLOTS: int
    """Of how many steps there is dQ in shared memory."""
    CONSUMER_REGS: int
    OTHER_REGS: int
    """Registers of a thread of the warpgroups, and of the warps that copy and add."""
