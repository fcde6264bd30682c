"""Orders configs before anything is compiled: the cost model with estimated resources."""

from dataclasses import replace

from blocktune.kernels.config import KernelConfig
from blocktune.kernels.device import DeviceSpec
from blocktune.kernels.flash_kernel import padded_width
from blocktune.kernels.kernel import AttentionKernel
from blocktune.kernels.limits import MAX_REGISTERS_PER_THREAD, WARP_SIZE
from blocktune.kernels.resources import KernelResources
from blocktune.kernels.shape import AttentionShape
from blocktune.tuner.cost_model import parts_of, predict
from blocktune.tuner.occupancy import occupancy, registers_for

REGISTERS_BESIDE_TILES = {False: 60, True: 48}
"""A thread's registers beside its tiles, read off Hopper's code for 4 and 8 warps; by whether other warps copy for it,
which spares it the addresses of the tiles (read off code for 8 and 16 computing warps)."""

COPYING_REGISTERS = 24
"""What a thread of a copying warp keeps of its registers; it hands the others to the computing ones."""


def usefulness(kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, device: DeviceSpec) -> float:
    """Orders configs before they are compiled, the most promising first: a time with resources that are estimated.

    Rates that the device lacks are taken as typical: they hardly change the order, and nobody is shown the number.
    """
    resources = estimated_resources(kernel, config, shape, device)
    occupied = occupancy(resources, device.limits)
    if occupied.blocks_per_sm == 0:
        return float("inf")
    softmax = kernel.softmax_cost(config)
    config, folded = kernel.as_forward(config, shape)
    parts = parts_of(folded, shape)
    return predict(folded, config, resources, occupied, _with_typical_rates(device), softmax, parts).total_us


def estimated_resources(
    kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, device: DeviceSpec
) -> KernelResources:
    """Resources as they will roughly be once compiled: float32 tiles plus some registers a thread.

    What exceeds the registers that a thread can have is taken as spilled. Tensor memory holds the accumulators of
    tcgen05, and `mma` needs the query tile in registers too.
    """
    unit = device.limits.mma
    warps, copying = kernel.total_warps(config), kernel.softmax_cost(config).copying_warps
    threads = WARP_SIZE * (warps - copying)
    scores, accumulator = config.block_m * config.block_n, config.block_m * padded_width(shape.head_dim_v)
    held = scores if unit == "tcgen05" else scores + accumulator
    if unit in ("mma", "none"):
        held += config.block_m * padded_width(shape.head_dim) * shape.element_bytes // 4
    needed = held // threads + REGISTERS_BESIDE_TILES[copying > 0]
    launched = available = MAX_REGISTERS_PER_THREAD
    if copying:  # the block starts with all registers of the SM, spread evenly, and then redistributes them
        launched = registers_for(1, warps, device.limits) or MAX_REGISTERS_PER_THREAD
        given = copying * (launched - COPYING_REGISTERS) // (warps - copying)
        available = min(launched + given, MAX_REGISTERS_PER_THREAD)
    return KernelResources(
        registers=launched if copying else min(needed, launched),
        shared_bytes=kernel.shared_bytes(config, shape, device.limits),
        spill_bytes=4 * max(0, needed - available),
        num_warps=warps,
        tensor_cores=unit,
    )


def _with_typical_rates(device: DeviceSpec) -> DeviceSpec:
    """The device with a rate of its generation for every one that is unknown."""
    flops = {"none": 256, "mma": 1024, "wgmma": 4096, "tcgen05": 8192}[device.limits.mma]
    return replace(
        device,
        tensor_flops_per_clock=device.tensor_flops_per_clock or flops,
        clock_mhz=device.clock_mhz or 1700,
        memory_gbs=device.memory_gbs or 10.0 * device.num_sms,  # a few times less than L2, as on most GPUs
    )
