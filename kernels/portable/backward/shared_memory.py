"""Shared memory of a backward pass, read off the allocations of Triton 3.6."""

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, WARPGROUP_ROWS, WARPGROUP_WARPS, padded_width
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape

ROW_VALUES_BYTES = 8
"""Of a query row, in float32: its log-sum-exp and delta."""


def pass_bytes(
    owned: int, walked: int, stages: int, shape: AttentionShape, limits: ComputeLimits, *, row_values: bool = False
) -> int:
    """Of a pass whose programs own `owned` rows and walk tiles of `walked` rows, with row values of these or not: the
    rows that are owned, the buffers of those walked, and ds where warps exchange it. Never above what is allocated."""
    row_bytes = (padded_width(shape.head_dim) + padded_width(shape.head_dim_v)) * shape.element_bytes
    owned_bytes, walked_bytes = owned * row_bytes, walked * row_bytes
    short = shape.element_bytes == 2
    warpgroup = limits.mma in ("wgmma", "tcgen05") and owned >= WARPGROUP_ROWS
    if limits.mma == "none":  # no asynchronous copies: operands on their way to other threads
        return (2 if short else 1) * owned_bytes + walked_bytes
    if warpgroup and limits.mma == "tcgen05" and not short:  # half of what is owned may be in tensor memory
        return owned_bytes // 2 + (stages - 1) * walked_bytes
    if not short:  # each operand is split into two tf32 ones
        buffers = stages * walked_bytes if warpgroup else max(stages - 2, 0) * walked_bytes + walked_bytes // 2
        return 2 * owned_bytes + buffers
    values = (stages - 1) * walked * ROW_VALUES_BYTES * row_values
    if warpgroup:
        return owned_bytes + stages * walked_bytes + values
    exchanged = owned * walked * shape.element_bytes if owned < padded_width(shape.head_dim) else 0
    return owned_bytes + ((stages - 1) * walked_bytes or walked_bytes // 2) + values + exchanged


def adding_bytes(
    config: KernelConfig, shape: AttentionShape, limits: ComputeLimits, *, by_copy_engine: bool
) -> dict[str, int]:
    """Return the further tiles of a pass over keys that makes and adds its share of dq, in bytes by name.

    They were read off for wgmma alone; elsewhere none is counted. A tile of few queries has K again, as `mma` wants it.
    With two stages the share is on its way out while the next tile comes: beside dS by the copy engine, in its place by
    atomics.
    """
    if limits.mma != "wgmma" or shape.element_bytes != 2:
        return {}
    width, m, n = padded_width(shape.head_dim), config.block_m, config.block_n
    if n < WARPGROUP_ROWS:  # more than this, by the warps and rows
        return {"dQ": m * width * FLOAT32_BYTES} if by_copy_engine and config.num_stages > 1 else {}
    again = {"K": n * width * shape.element_bytes} if m < WARPGROUP_ROWS else {}
    if config.num_stages == 1:
        return again
    ds, dq = {"dS": n * m * shape.element_bytes}, {"dQ": m * width * FLOAT32_BYTES}
    if by_copy_engine:
        return again | ds | dq
    return dq if not again and (m == WARPGROUP_ROWS or config.num_warps > WARPGROUP_WARPS) else again | ds
