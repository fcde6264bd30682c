"""Shared memory of a backward pass, read off the allocations of Triton 3.6."""

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, WARPGROUP_ROWS, WARPGROUP_WARPS, padded_width
from blocktune.kernels.base.tile_bounds import MOST_SCRATCH_BYTES, TENSOR_MEMORY_ROWS, TENSOR_MEMORY_UNIT
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

ROW_VALUES_BYTES = 8
"""Of a query row, in float32: its log-sum-exp and delta."""


def pass_bytes(
    owned: int, walked: int, stages: int, shape: AttentionShape, limits: ComputeLimits, *, row_values: bool = False
) -> int:
    """Return the bytes of a pass whose programs own `owned` rows and walk tiles of `walked` rows, with row values of
    these or not: the rows that are owned, the buffers of those walked, and ds where warps exchange it. Never above what
    is allocated."""
    row_bytes = (padded_width(shape.head_dim) + padded_width(shape.head_dim_v)) * shape.element_bytes
    owned_bytes, walked_bytes = owned * row_bytes, walked * row_bytes
    short = shape.element_bytes == 2
    warpgroup = limits.mma in ("wgmma", "tcgen05") and owned >= WARPGROUP_ROWS
    values = (stages - 1) * walked * ROW_VALUES_BYTES * row_values
    if limits.mma == "none":  # no asynchronous copies: operands on their way to other threads
        return (2 if short else 1) * owned_bytes + walked_bytes
    if not short and warpgroup:  # an operand is two TF32 tiles; tcgen05 holds the owned rows in tensor memory
        held = 2 * owned_bytes if limits.mma == "wgmma" else 0
        return held + (stages - 1) * walked_bytes + values + 2 * walked * _widest(shape) * FLOAT32_BYTES
    if not short:
        first_bytes = walked * padded_width(shape.head_dim) * FLOAT32_BYTES
        buffers = first_bytes if stages == 1 else (stages - 2) * walked_bytes + walked_bytes // 2
        return 2 * owned_bytes + buffers + values
    if warpgroup:
        return owned_bytes + stages * walked_bytes + values
    exchanged = owned * walked * shape.element_bytes if owned < padded_width(shape.head_dim) else 0
    return owned_bytes + ((stages - 1) * walked_bytes or walked_bytes // 2) + values + exchanged


def most_pass_bytes(
    owned: int, walked: int, stages: int, shape: AttentionShape, limits: ComputeLimits, *, row_values: bool = False
) -> int:
    """Return an upper bound of `pass_bytes` for float32; of 16-bit types the same."""
    least_bytes = pass_bytes(owned, walked, stages, shape, limits, row_values=row_values)
    if shape.element_bytes == 2 or limits.mma == "none":
        return least_bytes
    width, width_v = padded_width(shape.head_dim), padded_width(shape.head_dim_v)
    if owned >= WARPGROUP_ROWS and limits.mma == "wgmma":
        return least_bytes
    if owned >= WARPGROUP_ROWS and limits.mma == "tcgen05":  # all that products read where TF32 is allowed
        return least_bytes + (owned + walked) * (width + width_v) * FLOAT32_BYTES + MOST_SCRATCH_BYTES
    held = 2 * owned * (width + width_v)
    # with one stage both TF32 tiles of the second operand; with buffers ds on its way to other warps
    rest = max(width, 2 * width_v) if stages == 1 else (stages - 1) * (width + width_v) + owned
    return FLOAT32_BYTES * (held + walked * rest) + (stages - 1) * walked * ROW_VALUES_BYTES * row_values


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
    """Return an upper bound of a float32 pass over keys that adds its share of dq.

    In addition to the buffers it counts K as the second operand, dS on its way to other warps, and dq on its way to the
    copy engine.
    """
    width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
    row = width + padded_width(shape.head_dim_v)
    walking = most_pass_bytes(n, m, config.num_stages, shape, limits, row_values=True)
    values = 2 * (config.num_stages - 1) * m * ROW_VALUES_BYTES
    exchanged = max(2 * n, width) if config.num_stages > 1 else 2 * n
    exchanging = FLOAT32_BYTES * (2 * n * row + (config.num_stages - 1) * m * row + m * exchanged)
    leaving = m * width * FLOAT32_BYTES if by_copy_engine else 0
    return max(walking, exchanging) + 2 * n * width * FLOAT32_BYTES + leaving + values
