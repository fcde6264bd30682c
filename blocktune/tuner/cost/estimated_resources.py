"""Registers, shared memory, spills and accesses of a launch as they will roughly be once it is compiled."""

from blocktune.kernels.base.flash_kernel import WARPGROUP_ROWS, padded_width
from blocktune.kernels.base.kernel import AttentionKernel, SecondLaunch
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import MAX_REGISTERS_PER_THREAD, WARP_SIZE, ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Direction
from blocktune.tuner.occupancy.calculator import registers_for
from blocktune.tuner.occupancy.compiled_code import CompiledCode, needs_accesses
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

REGISTERS_BESIDE_TILES = {False: 60, True: 48}
"""A thread's registers besides its tiles, by whether other warps copy for it, which spares it the addresses of the
tiles. Read off Hopper's code: for 4 and 8 warps without copying warps, and for 8 and 16 computing warps with them."""

LONE_REGISTERS = 40
"""Those of a thread whose warp walks alone, read off the code of decoding on Hopper: 32 to 46 but for 8-bit tiles of 32
keys a warp whose tokens have scales."""

WAVEFRONTS_PER_MULTIPLY_ADD = 1.0
"""Of shared memory, for every multiply-add that a warp issues where products run without tensor cores. Read off
Turing's code: 0.7 to 1.3."""

COPYING_REGISTERS = 24
"""What a thread of a copying warp keeps of its registers; it hands the others to the computing ones."""


def estimated_code(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, device: DeviceSpec
) -> CompiledCode:
    """Return the code of the longest launch, with `estimated_resources`."""
    blocks, folded = kernel.as_forward(config, shape)
    resources = estimated_resources(kernel, config, shape, device)
    return _with_accesses(resources, blocks, folded, kernel.softmax_cost(config).products)


def estimated_resources(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, device: DeviceSpec
) -> KernelResources:
    """Return the resources of the longest launch: float32 tiles plus some registers per thread.

    What exceeds the registers that a thread can have is taken as spilled.
    """
    warps, copying = kernel.total_warps(config), kernel.softmax_cost(config).copying_warps
    needed = _needed_registers(kernel, config, shape, device.limits)
    launched = available = MAX_REGISTERS_PER_THREAD
    if copying:  # the block starts with all registers of the SM, spread evenly, and then redistributes them
        launched = registers_for(1, warps, device.limits) or MAX_REGISTERS_PER_THREAD
        given = copying * (launched - COPYING_REGISTERS) // (warps - copying)
        available = min(launched + given, MAX_REGISTERS_PER_THREAD)
    return KernelResources(
        registers=launched if copying else min(needed, launched),
        shared_bytes=kernel.launch_bytes(config, shape, device.limits),
        spill_bytes=4 * max(0, needed - available),
        num_warps=warps,
        tensor_cores=device.limits.mma,
    )


def estimated_second_code(launch: SecondLaunch, device: DeviceSpec) -> CompiledCode:
    """Return that of the launch after the longest one, in the same way.

    It holds scores, their gradients and an accumulator.
    """
    config, width = launch.config, padded_width(launch.shape.head_dim)
    held = 2 * config.block_m * config.block_n + config.block_m * width
    needed = held // (WARP_SIZE * config.num_warps) + REGISTERS_BESIDE_TILES[False]
    unit = device.limits.mma if config.block_m >= WARPGROUP_ROWS or device.limits.mma == "none" else "mma"
    resources = KernelResources(
        registers=min(needed, MAX_REGISTERS_PER_THREAD),
        shared_bytes=launch.shared_bytes,
        spill_bytes=4 * max(0, needed - MAX_REGISTERS_PER_THREAD),
        num_warps=config.num_warps,
        tensor_cores=unit,
    )
    return _with_accesses(resources, config, launch.shape, launch.softmax.products)


def _with_accesses(
    resources: KernelResources, config: KernelConfig, shape: AttentionShape, products: int
) -> CompiledCode:
    """Return the code with what its products load from shared memory, where they run without tensor cores."""
    if not needs_accesses(resources):
        return CompiledCode(resources, None)
    widths = padded_width(shape.head_dim) + padded_width(shape.head_dim_v)
    multiply_adds = products * config.block_m * config.block_n * widths // 2
    issued = multiply_adds // (WARP_SIZE * resources.num_warps)
    return CompiledCode(resources, SharedAccesses(load_wavefronts=round(issued * WAVEFRONTS_PER_MULTIPLY_ADD)))


def _needed_registers(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, limits: ComputeLimits
) -> int:
    """Return the registers of a thread that computes, however many it can have."""
    softmax = kernel.softmax_cost(config)
    tiles = kernel.own_tiles(config, shape, limits) if softmax.lone_warps else None
    if tiles is not None:  # every warp holds queries and an output of its own
        return tiles.least_registers + LONE_REGISTERS
    threads = WARP_SIZE * (kernel.total_warps(config) - softmax.copying_warps)
    return _float32_elements(config, shape, limits) // threads + REGISTERS_BESIDE_TILES[softmax.copying_warps > 0]


def _float32_elements(config: KernelConfig, shape: AttentionShape, limits: ComputeLimits) -> int:
    """Return the elements in float32 that a block holds. Tensor memory holds the accumulators of tcgen05, and `mma`
    needs the query tile in registers too. A backward also holds the gradients of scores, and two accumulators."""
    scores = config.block_m * config.block_n
    if shape.direction is Direction.BACKWARD:
        return 2 * scores + config.block_n * (padded_width(shape.head_dim) + padded_width(shape.head_dim_v))
    held = scores if limits.mma == "tcgen05" else scores + config.block_m * padded_width(shape.head_dim_v)
    if limits.mma in ("mma", "none"):
        held += config.block_m * padded_width(shape.head_dim) * shape.element_bytes // 4
    return held
