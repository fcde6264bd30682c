"""Orders configs before anything is compiled: the cost model with estimated code."""

from dataclasses import replace

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.estimated_resources import estimated_code
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.occupancy.calculator import occupancy


def usefulness(kernel: AttentionKernel, config: KernelConfig, shape: AttentionShape, device: DeviceSpec) -> float:
    """Order configs before they are compiled, the most promising first: a time of code that is estimated.

    Rates that the device lacks are taken as typical: they hardly change the order, and the number is not shown.
    """
    code = estimated_code(kernel, config, shape, device)
    if occupancy(code.resources, device.limits).blocks_per_sm == 0:
        return float("inf")
    return predict_us(kernel, config, shape, _with_typical_rates(device), code)


def _with_typical_rates(device: DeviceSpec) -> DeviceSpec:
    """Return the device with a rate of its generation for every one that is unknown."""
    flops = {"none": 256, "mma": 1024, "wgmma": 4096, "tcgen05": 8192}[device.limits.mma]
    return replace(
        device,
        tensor_flops_per_clock=device.tensor_flops_per_clock or flops,
        clock_mhz=device.clock_mhz or 1700,
        memory_gbs=device.memory_gbs or 10.0 * device.num_sms,  # a few times less than L2, as on most GPUs
    )
