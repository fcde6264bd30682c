"""What the warps of the 8-bit Hopper forward get by name: memory and barriers, scales, and what is known at compile
time."""

from typing import Any, NamedTuple


class Tensors(NamedTuple):
    """The tensors of a launch: descriptors of q, k, v and the output; lse or None; and two int32
    zeros to count tiles with."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    counter: Any


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


class Tile(NamedTuple):
    """What all steps of a consumer's tile have in common.

    q: the operand that `queries` gives. seen: `MaskBounds` of the rows. scale: of scores. no_acc: zeros like the scores
    [64, BLOCK_N].
    """

    memory: Any
    q: Any
    seen: Any
    scale: Any
    no_acc: Any


class State(NamedTuple):
    """What a step leaves to the next one.

    due: the factor that the sums of earlier stretches are due. acc: the accumulator of this stretch. p: probabilities
    as `packed` made them, whose product is still to be added. factor: of the accumulator. base: of exponents. sums: as
    `softmax` gave them.
    """

    due: Any
    acc: Any
    p: Any
    factor: Any
    base: Any
    sums: Any


class Options(NamedTuple):
    """The constants of `flash_fwd_fp8_kernel`.

    Query i sees the keys .. i + right (RIGHT: where there is such a bound) that there are.
    """

    BLOCK_N: int
    """Keys of a block."""
    STAGES: int
    """Slots of K and V."""
    CONSUMERS: int
    """Warpgroups of 64 query rows."""
    RAGGED: bool
    """The last block may reach beyond the keys."""
    RIGHT: bool
    ALIGNED: bool
    """In the one block that has to be masked every row sees a key."""
    Q_REGISTERS: bool
    """Queries are operands in registers."""
    TURNS: bool
    """Values are transposed by warps of the kernel, otherwise by a pass before it."""
    ONE_STRETCH: bool
    """No sums are taken over from the accumulators before the last key."""
    CONSUMER_REGS: int
    PRODUCER_REGS: int
    """Registers of a thread."""
    LEFT: bool = False
    """No window."""
