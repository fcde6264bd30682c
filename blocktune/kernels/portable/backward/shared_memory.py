"""Shared memory of a backward pass, read off the allocations of Triton 3.6."""

from dataclasses import dataclass

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, WARPGROUP_ROWS, WARPGROUP_WARPS, padded_width
from blocktune.kernels.base.tile_bounds import MOST_SCRATCH_BYTES, TENSOR_MEMORY_ROWS, TENSOR_MEMORY_UNIT
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape

CONVERTED_ROWS = 8
"""Rows of a tile that a warp moves at a time to change their layout, where `mma` multiplies."""
CONVERTED_COLUMNS = 64
"""Columns of which these are; of narrower tiles they are as many more."""
MANY_KEYS = 128
"""Keys of a tile from which on K is there twice where dq is added up."""
NARROWEST_ALONE = 32
"""Columns below which float32 tiles of keys have a buffer more."""
ROW_VALUES_BYTES = 8
"""Of a query row, in float32: its log-sum-exp and delta."""


@dataclass(frozen=True, slots=True)
class TilePass:
    """A pass whose programs own `owned` rows and walk tiles of `walked` rows; row_values: each of these has its
    log-sum-exp and delta, as in a pass over keys."""

    owned: int
    walked: int
    stages: int
    num_warps: int
    row_values: bool = False

    @property
    def values_bytes(self) -> int:
        """The bytes of the buffers of row values."""
        return (self.stages - 1) * self.walked * ROW_VALUES_BYTES * self.row_values

    def turned(self, width: int) -> int:
        """Return the rows of a walked tile of this width that change their layout at a time."""
        return min(self.walked, CONVERTED_ROWS * self.num_warps * max(1, CONVERTED_COLUMNS // width))


def over_keys(config: KernelConfig) -> TilePass:
    """Return the tiles of a pass whose programs own `block_n` keys."""
    return TilePass(config.block_n, config.block_m, config.num_stages, config.num_warps, row_values=True)


def pass_bytes(tiles: TilePass, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of a pass: the rows that are owned, the buffers of those walked, and ds where warps exchange it.
    Never above what is allocated."""
    owned, walked, stages, values = tiles.owned, tiles.walked, tiles.stages, tiles.values_bytes
    row_bytes = (padded_width(shape.head_dim) + padded_width(shape.head_dim_v)) * shape.element_bytes
    owned_bytes, walked_bytes = owned * row_bytes, walked * row_bytes
    short = shape.element_bytes == 2
    warpgroup = limits.mma in ("wgmma", "tcgen05") and owned >= WARPGROUP_ROWS
    if limits.mma == "none":  # no asynchronous copies: operands on their way to other threads
        return (2 if short else 1) * owned_bytes + walked_bytes
    if not short and warpgroup:  # an operand is two TF32 tiles; tcgen05 holds the owned rows in tensor memory
        held = 2 * owned_bytes if limits.mma == "wgmma" else 0
        return held + (stages - 1) * walked_bytes + values + 2 * walked * _widest(shape) * FLOAT32_BYTES
    if not short:
        buffers = _float32_rows(tiles, shape) if tiles.row_values else _first_rows(tiles, shape)
        return 2 * owned_bytes + buffers + values
    if warpgroup:
        return owned_bytes + stages * walked_bytes + values
    exchanged = owned * walked * shape.element_bytes if owned < padded_width(shape.head_dim) else 0
    return owned_bytes + ((stages - 1) * walked_bytes or walked_bytes // 2) + values + exchanged


def _float32_rows(tiles: TilePass, shape: AttentionShape) -> int:
    """Return the bytes of the walked rows of a pass over keys where `mma` multiplies float32: a tile, and the rows of
    it that change their layout at a time; at least, where warps need not exchange ds."""
    width, width_v = padded_width(shape.head_dim), padded_width(shape.head_dim_v)
    turned = tiles.turned(CONVERTED_COLUMNS) if tiles.owned < width == width_v else 0
    return (tiles.walked + turned) * min(width, width_v) * FLOAT32_BYTES


def _first_rows(tiles: TilePass, shape: AttentionShape) -> int:
    """Return the bytes of the walked rows of a pass over queries there: half a pair of tiles a stage; at least, where
    one is narrower than the other."""
    narrower = min(padded_width(shape.head_dim), padded_width(shape.head_dim_v))
    return tiles.stages * tiles.walked * narrower * FLOAT32_BYTES


def most_pass_bytes(tiles: TilePass, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return an upper bound of `pass_bytes`."""
    least_bytes, owned, walked = pass_bytes(tiles, shape, limits), tiles.owned, tiles.walked
    width, width_v = padded_width(shape.head_dim), padded_width(shape.head_dim_v)
    if limits.mma == "none":  # ds on its way to other threads, in float32
        of_list = shape.features.mask is MaskKind.BLOCK_SPARSE
        return least_bytes + (1 + of_list) * owned * walked * FLOAT32_BYTES
    if shape.element_bytes == 2:
        return _most_short_bytes(tiles, shape, limits)
    if owned >= WARPGROUP_ROWS and limits.mma == "wgmma":
        return least_bytes + owned * walked * FLOAT32_BYTES * _is_masked(shape)
    if owned >= WARPGROUP_ROWS and limits.mma == "tcgen05":  # all that products read where TF32 is allowed
        return least_bytes + (owned + walked) * (width + width_v) * FLOAT32_BYTES + MOST_SCRATCH_BYTES
    turned = (walked + tiles.turned(_widest(shape))) * _widest(shape)
    walking = max(turned, walked * (width + width_v))
    if not tiles.row_values:
        walking = (tiles.stages + (_widest(shape) < NARROWEST_ALONE)) * walked * _widest(shape)
    masked = owned * walked if _is_masked(shape) and tiles.stages > 1 else 0
    held = 2 * owned * (width + width_v) + walking + masked
    return FLOAT32_BYTES * held + tiles.values_bytes


def _most_short_bytes(tiles: TilePass, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return an upper bound of a pass of 16-bit types. What belongs to a mask or to ds takes as much as a tile of
    float32 scores at most."""
    owned, walked, element_bytes = tiles.owned, tiles.walked, shape.element_bytes
    width, width_v = padded_width(shape.head_dim), padded_width(shape.head_dim_v)
    scores_bytes = owned * walked * element_bytes
    if limits.mma in ("wgmma", "tcgen05") and owned >= WARPGROUP_ROWS:
        again = walked * (width + width_v) * element_bytes + MOST_SCRATCH_BYTES if limits.mma == "tcgen05" else 0
        return pass_bytes(tiles, shape, limits) + 2 * scores_bytes + again
    owned_bytes, walked_bytes = (rows * (width + width_v) * element_bytes for rows in (owned, walked))
    turned = tiles.turned(_widest(shape))
    alone = (walked + turned) * _widest(shape) * element_bytes
    if tiles.stages == 1:
        both = walked_bytes + turned * width_v * element_bytes if tiles.row_values else 0
        return owned_bytes + max(alone, both, scores_bytes)
    listed = turned * _widest(shape) * element_bytes if shape.features.mask is MaskKind.BLOCK_SPARSE else 0
    walking = owned_bytes + (tiles.stages - 1) * walked_bytes + tiles.values_bytes
    return walking + max(scores_bytes * (1 + _is_masked(shape)), listed)


def _is_masked(shape: AttentionShape) -> bool:
    return shape.features.mask in (MaskKind.ADDITIVE, MaskKind.BOOLEAN)


def statistics_bytes(block_m: int, block_n: int, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the bytes of the launch that finds the row maxima of float32 scores: two TF32 tiles of the queries, and
    keys; with tensor memory it may be less. 0 for other types, which have none."""
    if shape.dtype != "float32" or limits.mma == "none":
        return 0
    queries = block_m * padded_width(shape.head_dim) * FLOAT32_BYTES
    keys = block_n * padded_width(shape.head_dim) * FLOAT32_BYTES
    return queries if limits.mma == "tcgen05" else 2 * queries + keys


def most_statistics_bytes(block_m: int, block_n: int, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return an upper bound of it."""
    if shape.dtype != "float32" or limits.mma == "none":
        return 0
    return (2 * block_m + block_n) * padded_width(shape.head_dim) * FLOAT32_BYTES + MOST_SCRATCH_BYTES


def most_pass_columns(owned: int, walked: int, summed: int, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return at most how many columns of tensor memory a float32 pass takes that sums up `summed` columns a row: two
    tiles of scores and the sums for each of three products, and an operand; of 64 rows a third lies below the rest."""
    if limits.mma != "tcgen05" or owned < WARPGROUP_ROWS or shape.dtype != "float32":
        return 0
    products = 3 if owned >= TENSOR_MEMORY_ROWS else 2
    return products * (2 * walked + summed) + max(_widest(shape), walked) + TENSOR_MEMORY_UNIT


def least_pass_columns(owned: int, walked: int, summed: int, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return at least how many: the scores and sums alone, if two tiles of 64 rows lie below each other."""
    if limits.mma != "tcgen05" or owned < WARPGROUP_ROWS or shape.dtype != "float32":
        return 0
    return 3 * (2 * walked + summed) * owned // TENSOR_MEMORY_ROWS


def _widest(shape: AttentionShape) -> int:
    return max(padded_width(shape.head_dim), padded_width(shape.head_dim_v))


def adding_bytes(
    config: KernelConfig, shape: AttentionShape, limits: ComputeLimits, *, by_copy_engine: bool
) -> dict[str, int]:
    """Return the further tiles of a pass over keys that makes and adds its share of dq, in bytes by name.

    They were read off for wgmma and `mma` alone; elsewhere none is counted. Of float32 these are both TF32 tiles of K
    as the second operand. A tile of few queries has K again, as `mma` wants it. With two stages the share is on its way
    out while the next tile comes: the copy engine needs memory for it in addition to dS; atomics reuse that of dS.
    """
    width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
    if shape.dtype == "float32" and limits.mma in ("mma", "wgmma"):
        return {"K": 2 * n * width * FLOAT32_BYTES}
    if limits.mma == "mma" and shape.element_bytes == 2:
        return _adding_by_mma(config, shape, by_copy_engine=by_copy_engine)
    if limits.mma != "wgmma" or shape.element_bytes != 2:
        return {}
    if n < WARPGROUP_ROWS:  # more than this, by the warps and rows
        return {"dQ": m * width * FLOAT32_BYTES} if by_copy_engine and config.num_stages > 1 else {}
    again = {"K": n * width * shape.element_bytes} if m < WARPGROUP_ROWS else {}
    if config.num_stages == 1:
        return again
    ds, dq = {"dS": n * m * shape.element_bytes}, {"dQ": m * width * FLOAT32_BYTES}
    if by_copy_engine:
        return again | ds | dq
    return dq if not again and (m == WARPGROUP_ROWS or config.num_warps > WARPGROUP_WARPS) else again | ds


def _adding_by_mma(config: KernelConfig, shape: AttentionShape, *, by_copy_engine: bool) -> dict[str, int]:
    """Return the further tiles of 16-bit types where warps multiply alone. Fewer keys than columns have dS in the pass
    already; of one stage, and of columns that are filled up, none is counted."""
    width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
    if config.num_stages == 1 or n < width or shape.head_dim != width:
        return {}
    leaving = {"dQ": m * width * FLOAT32_BYTES} if by_copy_engine else {}
    return {"dS": n * m * shape.element_bytes} | leaving


def most_adding_bytes(
    config: KernelConfig, shape: AttentionShape, limits: ComputeLimits, *, by_copy_engine: bool
) -> int:
    """Return an upper bound of a pass over keys that adds its share of dq.

    In addition to the buffers it counts K as the second operand, dS on its way to other warps, and dq on its way to the
    copy engine.
    """
    width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
    row = width + padded_width(shape.head_dim_v)
    walking = most_pass_bytes(over_keys(config), shape, limits)
    if shape.element_bytes == 2 and limits.mma == "mma":
        return walking + _most_added_by_mma(config, shape, by_copy_engine=by_copy_engine)
    if limits.mma == "none":
        return walking
    if shape.element_bytes == 2:
        leaving = (2 if limits.mma == "tcgen05" else 1) * m * width * FLOAT32_BYTES
        return walking + (n * width + 2 * n * m) * shape.element_bytes + leaving
    values = 2 * (config.num_stages - 1) * m * ROW_VALUES_BYTES
    exchanged = max(2 * n, width) if config.num_stages > 1 else 2 * n
    exchanging = FLOAT32_BYTES * (2 * n * row + (config.num_stages - 1) * m * row + m * exchanged)
    leaving = m * width * FLOAT32_BYTES if by_copy_engine else 0
    return max(walking, exchanging) + 2 * n * width * FLOAT32_BYTES + leaving + values


def _most_added_by_mma(config: KernelConfig, shape: AttentionShape, *, by_copy_engine: bool) -> int:
    """Return an upper bound of the further bytes of 16-bit types where warps multiply alone: of one stage K again for
    many keys; else dS, next to others for few keys or a mask, and what leaves by the copy engine."""
    m, n, width = config.block_m, config.block_n, padded_width(shape.head_dim)
    if config.num_stages == 1:
        return n * width * shape.element_bytes if n >= MANY_KEYS else 0
    few = n < WARPGROUP_ROWS
    beside = 2 * n * m * shape.element_bytes if few or _is_masked(shape) else 0
    leaving = m * width * FLOAT32_BYTES if by_copy_engine else 0
    return n * m * shape.element_bytes + max(beside, n * width * shape.element_bytes if few else 0) + leaving
