"""What the Hopper forward makes of a shape, on the host: tiles and their memory, bounds, and masks."""

from blocktune.kernels.base.flash_kernel import heads_per_group
from blocktune.kernels.hardware.limits import MULTIPROCESSORS
from blocktune.kernels.hopper.biases.arguments import mask_code
from blocktune.kernels.hopper.forward.device_kernel import SIZES
from blocktune.kernels.hopper.forward.lines import LINE_COLUMNS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import UNLIMITED, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal

ROWS = 64
"""Query rows of a consumer warpgroup: one wgmma."""
WARPS = 4
"""Of a consumer; also what the producer takes: one warp that copies, and three idle ones up to a whole warpgroup."""
WIDTHS = (64, 96, 128, 192, 256)
"""Head dimensions that tiles have; those between are filled up with zeros by the copy engine."""
MIN_HEAD_DIM = 24
"""Below, three quarters of a tile would be zeros."""
NARROW_HEADS = 32
"""Of which half of a tile or more is zeros: the portable kernels' rows are as long, or not much longer."""
ALIGNED_ELEMENTS = 8
"""Of a head: the copy engine's rows begin at multiples of 16 bytes."""
REGISTERS = {2: (240, 24), 3: (160, 32), 4: (112, 32)}
"""Registers a thread of the consumers and of the producer, by the number of consumers: they share 65,536."""
PAGING_REGISTERS = 32
"""Of the producer at least where it looks up pages."""
MIN_PAGE = 8
"""Keys of a page: as many rows as a swizzle has."""
RESERVED_REGISTERS = 24
"""Of a consumer, that ptxas gives to no operand of a product: with more of these it waits for each (C7512)."""
SHARED_BYTES = 227 << 10
"""What a block of compute capability 9.0 can have."""
PANEL = 64
"""Columns of the output that leave at once where there is no room for all: one swizzle."""
PANEL_SLOTS = 2
"""Places of a consumer for panels."""
MOST_PAIRS = 4
"""Slots that hold K and V together."""
LEAST_SLOTS = 3
"""Of one ring: a consumer holds one tile while it passes over another and awaits a third."""
LAST_ROUNDS = 1.9
"""Tiles of a multiprocessor in the last group of heads by which it ends with its longest tile, or nearly so."""
MOST_WITH_LINES = 192
"""Keys of a block and columns of values with which a consumer has registers for the slope's terms."""
BARRIER_BYTES = 1 << 10
"""More than the barriers and the ring of tiles take."""


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile that holds heads of this dimension."""
    return next(width for width in WIDTHS if width >= head_dim)


def panels_of(width: int) -> int:
    """Return the panels of a tile: three where the width is no power of two."""
    return 3 if width % 3 == 0 else 1


def shares_memory(config: KernelConfig, shape: AttentionShape) -> bool:
    """Return whether the output leaves where Q was, because there is no room for both: then the next tile's Q waits for
    it."""
    if leaves_in_panels(config):
        return False
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    panels, panels_v = panels_of(width), panels_of(width_v)
    place = 2 * width // 3 if panels > panels_v else width  # a whole tile needs one, not the three panels of another
    if panels_v > panels or width_v > place:
        return False
    q_bytes, o_bytes, slot_bytes = tile_bytes(config, shape)
    return q_bytes + o_bytes + config.num_stages * slot_bytes + BARRIER_BYTES > SHARED_BYTES


def leaves_in_panels(config: KernelConfig) -> bool:
    """Return whether the output leaves by PANEL columns, through PANEL_SLOTS places of each consumer in turns."""
    return bool(config.parameters.get("output_panels"))


def has_one_ring(config: KernelConfig) -> bool:
    """Return whether a tile of K or V has a slot of its own, in one ring, instead of one slot for both."""
    return config.parameters.get("split_release") == 2


def ring_problem(config: KernelConfig, shape: AttentionShape) -> str | None:
    """Return what is wrong with the slots of a config, or None."""
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    if has_one_ring(config):
        if width != width_v or panels_of(width) > 1:
            return f"`split_release` must be 0 or 1 where head_dim is padded to {width} and head_dim_v to {width_v}."
        if config.num_stages < LEAST_SLOTS:
            return f"`num_stages` must be at least {LEAST_SLOTS} with one ring, but got {config.num_stages}."
    elif config.num_stages > MOST_PAIRS:
        return f"`num_stages` must be at most {MOST_PAIRS} where K and V share a slot, but got {config.num_stages}."
    return None


def panel_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of the places of all consumers for panels of the output."""
    return config.block_m * PANEL_SLOTS * PANEL * shape.element_bytes


def tile_bytes(config: KernelConfig, shape: AttentionShape) -> tuple[int, int, int]:
    """Return the bytes of Q and the output of all consumers, and of a slot."""
    row, row_v = (shape.element_bytes * tile_width(dim) for dim in (shape.head_dim, shape.head_dim_v))
    slot_row = row if has_one_ring(config) else row + row_v
    return config.block_m * row, config.block_m * row_v, config.block_n * slot_row


def blocks_of(config: KernelConfig, shape: AttentionShape) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) that a copy of q, k, v and the output moves."""
    width, width_v = tile_width(shape.head_dim), tile_width(shape.head_dim_v)
    panel, panel_v = width // panels_of(width), width_v // panels_of(width_v)
    leaving = PANEL if leaves_in_panels(config) else panel_v
    k_block, v_block = (key_block(config, shape, columns) for columns in (panel, panel_v))
    return (ROWS, panel), k_block, v_block, (ROWS, leaving)


def key_block(config: KernelConfig, shape: AttentionShape, columns: int) -> tuple[int, int]:
    """Return (rows, columns) that a copy of keys or values moves of a panel: of pages what one of them has of a block,
    by a swizzle's columns."""
    if not shape.features.page_size:
        return config.block_n, columns
    return min(config.block_n, shape.features.page_size), min(columns, PANEL)


def has_own_lengths(shape: AttentionShape) -> bool:
    """Return whether every sequence has lengths of its own: packed ones, and entries of a cache."""
    return shape.features.varlen or shape.features.cached


def bounds_of(shape: AttentionShape) -> tuple[int | None, int | None]:
    """Return (right, left): query i sees the keys i + left .. i + right, None without such a bound. Where sequences
    have lengths of their own each has its own diagonal, which is not in these."""
    features, diagonal = shape.features, 0 if has_own_lengths(shape) else shape.diagonal
    window_left, window_right = features.window or (UNLIMITED, UNLIMITED)
    window_right = 0 if shape.causal is not Causal.NONE else window_right
    right = None if window_right == UNLIMITED else diagonal + window_right
    return right, None if window_left == UNLIMITED else diagonal - window_left


def sizes_of(config: KernelConfig, shape: AttentionShape) -> dict[str, int]:
    """Return the integers of a launch that are not compiled in."""
    heads, (right, left) = shape.batch * shape.num_heads, bounds_of(shape)
    values = (shape.seqlen_q, shape.seqlen_k, shape.num_heads, shape.group_size, heads, heads_together(config, shape))
    return dict(zip(SIZES, (*values, right or 0, left or 0), strict=True))


def heads_together(config: KernelConfig, shape: AttentionShape) -> int:
    """Return how many heads' tiles a causal call takes together, the longest first: as many as the L2 cache holds, or
    more where the last group would be over before its longest tile, which takes twice the mean."""
    heads, tiles = shape.batch * shape.num_heads, -(-shape.seqlen_q // config.block_m)
    least = LAST_ROUNDS * MULTIPROCESSORS / tiles
    return next((group for group in range(heads_per_group(shape), heads) if (heads % group or group) >= least), heads)


def mask_constants(block_n: int, shape: AttentionShape) -> dict[str, bool]:
    """Return which masks there are. A row that sees its last key at most needs no check of the end of the keys, nor
    does one with a boolean mask, which is laid out with hidden keys beyond it. Added to the NaN that an infinite query
    makes of no key, -inf hides nothing."""
    varies, (right, left) = has_own_lengths(shape), bounds_of(shape)
    has_diagonal = (right, left) != (None, None) or shape.features.alibi
    lower_right = varies and shape.causal is not Causal.UPPER_LEFT and has_diagonal
    last_seen = 0 if lower_right else shape.seqlen_k - shape.seqlen_q
    inside = right is not None and right <= last_seen and (lower_right or not varies)
    is_laid_out = shape.features.mask is MaskKind.BOOLEAN
    starts_a_block = right is None or (right >= 0 and right % block_n == 0)
    return {
        "RAGGED": (varies or (shape.seqlen_k % block_n != 0 and not is_laid_out)) and not inside,
        "RIGHT": right is not None,
        "LEFT": left is not None,
        "LOWER_RIGHT": lower_right,
        "ALIGNED": not varies and left is None and starts_a_block,
    }


def memory_bytes(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the bytes of Q and the output of all consumers (`shares_memory`, `leaves_in_panels`) and the slots of K
    and V."""
    q_bytes, o_bytes, slot_bytes = tile_bytes(config, shape)
    whole_bytes = max(q_bytes, o_bytes) if shares_memory(config, shape) else q_bytes + o_bytes
    if leaves_in_panels(config):
        whole_bytes = q_bytes + panel_bytes(config, shape)
    return whole_bytes + config.num_stages * slot_bytes


def draws_lines(config: KernelConfig, shape: AttentionShape) -> bool:
    """Return whether ALiBi is a product of the tensor cores, where nothing else is done to scores, and where registers
    and shared memory have room for its operands. It takes 3 to 7 % less time than an instruction a score."""
    features = shape.features
    alone = features.alibi and not (features.softcap or features.dropout or mask_code(shape))
    fits = config.block_n + tile_width(shape.head_dim_v) <= MOST_WITH_LINES
    room = memory_bytes(config, shape) + line_bytes(config) + BARRIER_BYTES <= SHARED_BYTES
    return alone and fits and room


def line_bytes(config: KernelConfig) -> int:
    """Return the bytes of the places of a block's keys."""
    columns: int = LINE_COLUMNS.value
    return 2 * columns * config.block_n


def product_registers(config: KernelConfig, shape: AttentionShape) -> int:
    """Return the registers of a thread that operands and results of products take: accumulators, scores, probabilities
    and queries."""
    own, scores = config.parameters, config.block_n // 2
    probabilities = scores // 2 if own["early_p"] else scores
    return tile_width(shape.head_dim_v) // 2 + scores + probabilities + own.get("q_registers", 0) // 4


def spill_reason(config: KernelConfig, shape: AttentionShape) -> str | None:
    """Return that products need more registers than a consumer has, so that every step spills, if they do: of 1,600
    recorded configs the best takes 1.36 times as long as the best of its shape, and some do not compile."""
    needed, room = product_registers(config, shape), REGISTERS[config.block_m // ROWS][0] - RESERVED_REGISTERS
    if needed > room:
        return f"products spill with more registers than a thread has for them, but got {needed} of {room}"
    return None


def queries_problem(config: KernelConfig, shape: AttentionShape) -> str | None:
    """Return what is wrong with the queries in registers of a config, or None."""
    queries, width = config.parameters.get("q_registers", 0), tile_width(shape.head_dim)
    if not queries:
        return None
    part = width if panels_of(width) == 1 else 2 * width // 3
    if part % queries and queries != width:
        return f"`q_registers` must divide {part}, the head_dim of a part of Q, or be all {width}."
    return None
