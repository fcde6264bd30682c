"""On-chip tiles of a config: the tiles that its kernel lists, or those of an ordinary forward or backward.

    on_chip_of(kernel, config, shape, limits_for((9, 0)))

tuner/occupancy/forward_tiles.py has the ordinary forward, which is that of FlashAttention-2.
"""

from dataclasses import replace

from blocktune.kernels.base.flash_kernel import FLOAT32_BYTES, IN_ORDER, WARPGROUP_ROWS, padded_width
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.loops import BackwardLoops, tile_of
from blocktune.kernels.base.on_chip import ChipMemory, OnChip, gradient_tiles, shared_tile
from blocktune.kernels.hardware.limits import ComputeLimits
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.occupancy.forward_tiles import on_chip

MOVED = "tiles on their way between threads"
"""What shared memory has besides the tiles of a list: one that changes its layout, and barriers."""


def on_chip_of(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> OnChip | None:
    """Return what a block of the config keeps on the chip; None for products whose tiles are not listed."""
    found = kernel.own_tiles(config, shape, limits) or _ordinary(kernel, config, shape, limits)
    if found is None:
        return None
    whole = replace(found, tiles=(*found.tiles, *kernel.further_tiles(config, shape, limits)))
    needed = kernel.launch_bytes(config, shape, limits)
    if needed <= whole.shared_bytes:
        return whole
    moved = shared_tile(MOVED, needed - whole.bytes_in(ChipMemory.SHARED_MEMORY), 1, 1)
    return replace(whole, tiles=(*whole.tiles, moved))


def _ordinary(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> OnChip | None:
    if isinstance(kernel.loops, BackwardLoops):
        m, n = tile_of(kernel.loops.keys, config)
        return _backward(replace(config, block_m=m, block_n=n), shape, limits)
    blocks, folded = kernel.as_forward(config, shape)
    schedule = config.parameters.get("schedule", IN_ORDER)  # a kernel without it computes in order
    return on_chip(replace(blocks, extra=(("schedule", schedule),)), folded, limits)


def _backward(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> OnChip | None:
    """Return the pass over keys with 16-bit products of tensor cores, which reads tiles where `pass_bytes` says."""
    if limits.mma == "none" or shape.element_bytes != 2:
        return None
    m, n, stages = config.block_m, config.block_n, config.num_stages
    widths = padded_width(shape.head_dim), padded_width(shape.head_dim_v)
    by_warpgroup = limits.mma in ("wgmma", "tcgen05") and n >= WARPGROUP_ROWS
    depth = stages if by_warpgroup else stages - 1
    walked = [shared_tile(name, m, width, 2, depth) for name, width in zip(("Q", "dO"), widths, strict=True) if depth]
    if not depth:
        walked = [shared_tile("Q or dO, in turns", m, sum(widths) // 2, 2)]
    if stages > 1:
        walked += [shared_tile(name, m, 1, FLOAT32_BYTES, stages - 1) for name in ("LSE", "delta")]
    if not by_warpgroup and n < widths[0]:
        walked.append(shared_tile("dS", n, m, 2))
    owned = [shared_tile(name, n, width, 2) for name, width in zip("KV", widths, strict=True)]
    place = ChipMemory.TENSOR_MEMORY if limits.mma == "tcgen05" else ChipMemory.REGISTERS
    tiles = (*owned, *walked, *gradient_tiles(m, n, widths, 2, place))
    return OnChip(tiles=tiles, num_warps=config.num_warps)
