"""What the warps of the Hopper forwards get, by name: tensors, memory and barriers, sizes, biases and constants."""

from typing import Any, NamedTuple


class Tensors(NamedTuple):
    """The tensors of a launch: descriptors of q, k, v and the output, and pointers, None for what it has not."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    counter: Any
    """Two int32 zeros, and zeros again at the end."""
    cu_q: Any
    cu_k: Any
    """int32 [batch + 1] of packed sequences."""
    sinks: Any
    """A logit for each of num_heads."""
    lengths: Any = None
    """int32 [batch]: the keys that each entry of a cache has."""
    table: Any = None
    """int32: the pages of each entry."""


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
    """The integers of a launch; right and left: bounds of the keys that query 0 sees; lse_rows: a head's rows of the
    log-sum-exp. Of a cache: k_rows and v_rows, rows from an entry or page to the next one; table_line, numbers from a
    line of the table to the next one."""

    seqlen_q: Any
    seqlen_k: Any
    num_heads: Any
    group_size: Any
    batch_heads: Any
    head_group: Any
    right: Any
    left: Any
    lse_rows: Any = None
    k_rows: Any = None
    v_rows: Any = None
    table_line: Any = None


class Scaling(NamedTuple):
    """The factors of scores: the softmax scale times log2(e), and what a soft cap bends by."""

    scale_log2: Any
    bend: Any = None


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
    """The constants of `flash_fwd_hopper_kernel`.

    Query i sees the keys i + left .. i + right (RIGHT, LEFT: where there are such bounds; LOWER_RIGHT: of each packed
    sequence, plus its seqlen_k - seqlen_q).
    """

    BLOCK_N: int
    """Keys of a block."""
    STAGES: int
    """Slots of K and V."""
    CONSUMERS: int
    """Warpgroups of 64 query rows."""
    QK_PANELS: int
    V_PANELS: int
    """Panels of a tile of Q or K, and of V or the output: 1 or 3."""
    V_WIDTH: int
    """Columns of a panel of V."""
    PAGE_SIZE: int
    """Keys of a page of a cache, or 0: those of a block are next to each other."""
    RAGGED: bool
    """The last block may reach beyond the keys."""
    RIGHT: bool
    LEFT: bool
    LOWER_RIGHT: bool
    ALIGNED: bool
    """In the one block that has to be masked every row sees a key."""
    SOFTCAP: bool
    """Scores are tanh(bend * q k^T), and scale_log2 is the cap times log2(e)."""
    ALIBI: int
    """1 where no query sees a key right of its place, 2 where one does, 0 without ALiBi."""
    MASK: int
    """1 boolean, 2 additive (then scale_log2 is log2(e)), 0 without a mask tensor."""
    DROPOUT: bool
    LINES: bool
    """ALiBi is a product of the tensor cores (kernels/hopper/forward/lines.py)."""
    SPLIT_RELEASE: bool
    """K and V of a slot are given back apart."""
    ONE_RING: bool
    """Every tile of K or V has a slot of its own."""
    EARLY_P: bool
    """Probabilities are converted before the next scores are issued, otherwise during them."""
    KEEP_P: bool
    """Probabilities are named in the wait for their product, which changes nothing but ptxas' schedule."""
    Q_REGISTERS: int
    """Columns of the queries that a consumer has in registers."""
    FREE_Q: bool
    """All of them are there, so that the next tile's may come."""
    SHARE_O: bool
    """The output leaves where Q was."""
    O_SLOTS: int
    """Places of a consumer for panels of the output, or 0: it leaves whole through memory of its own."""
    CONSUMER_REGS: int
    PRODUCER_REGS: int
    """Registers of a thread."""
    KEY_PARTS: int = 1
    """Parts that the keys of a head are cut into, each with an output and a log-sum-exp of its own. Above 1 there is no
    left bound, and tiles with fewer blocks have a right bound, or RAGGED keys."""


class ShortOptions(NamedTuple):
    """The constants of `flash_fwd_hopper_short_kernel`, which `Options` explains."""

    BLOCK_N: int
    STAGES: int
    CONSUMERS: int
    RAGGED: bool
    RIGHT: bool
    ALIGNED: bool
    SPLIT_RELEASE: bool
    EARLY_P: bool
    KEEP_P: bool
    O_SLOTS: int
    JOINED: bool
    """Tiles meet in a step."""
    CONSUMER_REGS: int
    PRODUCER_REGS: int
    LEFT: bool = False
    """No window."""
