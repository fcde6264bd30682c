"""Which ceiling of a device a config meets first: arithmetic, device memory, or exponentials.

    ridge_point(device)                       # FLOP a byte at which both ceilings meet: 206 on an H200
    block_intensity(shape, block_m=128)       # 128 FLOP a byte of keys that a block reads at 2-byte types
    block_intensity(decode_shape, 64)         # 1: a single query uses every key once
    roofline(shape, traffic, device)          # against device memory

A kernel that performs fewer FLOP a byte than the ridge point cannot use all of the arithmetic (Williams, Waterman and
Patterson, CACM 52(4), 2009). The model in `tuner/cost/model.py` predicts a time; this says why it cannot be less.
"""

from dataclasses import dataclass
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.model import CostBreakdown
from blocktune.tuner.occupancy.calculator import Occupancy, Waves
from blocktune.tuner.traffic.model import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A problem under the two ceilings of a device. flops counts visible pairs; hbm_bytes are those of one algorithm.
    peak_tflops is in 1e12 FLOP/s, memory_gbs in 1e9 B/s."""

    flops: int
    hbm_bytes: int
    peak_tflops: float
    memory_gbs: float

    @property
    def intensity(self) -> float:
        """FLOP for every byte of device memory."""
        return self.flops / self.hbm_bytes

    @property
    def ridge_point(self) -> float:
        """The intensity at which both ceilings meet."""
        return self.peak_tflops * 1e3 / self.memory_gbs

    @property
    def bound_by_memory(self) -> bool:
        return self.intensity < self.ridge_point

    @property
    def attainable_tflops(self) -> float:
        """The lower of the two ceilings."""
        return min(self.peak_tflops, self.intensity * self.memory_gbs / 1e3)

    @property
    def least_us(self) -> float:
        """No time is less, whatever the kernel does about everything else."""
        return self.flops / self.attainable_tflops / 1e6

    def to_json(self) -> dict[str, Any]:
        return {
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "intensity": self.intensity,
            "ridge_point": self.ridge_point,
            "bound_by": "memory" if self.bound_by_memory else "arithmetic",
            "attainable_tflops": self.attainable_tflops,
            "least_us": self.least_us,
        }


def roofline(shape: AttentionShape, traffic: Traffic, device: DeviceSpec, *, density: float = 1.0) -> Roofline:
    """The problem with one algorithm's traffic under the ceilings of a device.

    Args:
        shape: the problem.
        traffic: of one algorithm.
        device: with its rates.
        density: the share of pairs that a block mask leaves, which the shape does not know.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    peak_tflops, memory_gbs = _ceilings(device)
    if shape.element_bytes == 4:
        peak_tflops /= 2  # tf32
    elif shape.element_bytes == 1:
        peak_tflops *= 2
    return Roofline(
        flops=round(shape.flops * density),
        hbm_bytes=traffic.total_bytes,
        peak_tflops=peak_tflops,
        memory_gbs=memory_gbs,
    )


def ridge_point(device: DeviceSpec) -> float:
    """FLOP a byte at which a device's 16-bit matrix products and its memory take equally long.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    peak_tflops, memory_gbs = _ceilings(device)
    return peak_tflops * 1e3 / memory_gbs


def block_intensity(shape: AttentionShape, block_m: int) -> float:
    """FLOP that a block performs for every byte of keys and values it reads, from wherever they come: 2 rows / element
    size. It depends neither on the head dimension nor on block_n, so block_m is the knob of bandwidth. Rows past the
    last query count for nothing, which leaves decode with about 1."""
    return 2 * min(block_m, shape.seqlen_q) / shape.element_bytes


def exp_over_products(breakdown: CostBreakdown) -> float:
    """The time of the exponentials over that of the matrix products. Near 1 and above, a kernel must overlap both."""
    return breakdown.exp_us / breakdown.tensor_us


def waves_of(shape: AttentionShape, block_m: int, occupied: Occupancy, num_sms: int) -> Waves:
    """The waves of a forward grid: a block for every query tile of every head.

    Raises:
        UsageError: no block fits an SM.
    """
    if occupied.blocks_per_sm == 0:
        raise UsageError(
            "Waves need a block that fits an SM, but this one needs more than there is. Take smaller blocks."
        )
    tiles = -(-shape.seqlen_q // block_m)
    return Waves(grid_blocks=tiles * shape.batch * shape.num_heads, resident_blocks=occupied.blocks_per_sm * num_sms)


def _ceilings(device: DeviceSpec) -> tuple[float, float]:
    """Peak TFLOP/s of 16-bit products and GB/s; where the first is not advertised, from the clock."""
    peak_tflops, memory_gbs = device.tensor_tflops, device.memory_gbs
    if peak_tflops is None and device.tensor_flops_per_clock and device.clock_mhz:
        peak_tflops = device.tensor_flops_per_clock * device.num_sms * device.clock_mhz / 1e6
    if peak_tflops is None or memory_gbs is None:
        missing = "memory_gbs" if memory_gbs is None else "tensor_tflops"
        raise UsageError(
            f"A roofline needs both ceilings of the device, but {missing} of {device.name} is unknown. "
            "Add its row to kernels/gpus.csv, or name a similar device of `tune devices`."
        )
    return peak_tflops, memory_gbs
