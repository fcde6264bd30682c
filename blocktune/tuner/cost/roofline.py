"""Which ceiling of a device a config meets first: arithmetic, device memory, or exponentials.

    ridge_point(device)                       # FLOP per byte at which both ceilings meet: 206 on an H200
    block_intensity(shape, block_m=128)       # 128 FLOP per byte of keys that a block reads at 2-byte types
    block_intensity(decode_shape, 64)         # 1: a single query uses every key once
    roofline(shape, traffic, device)          # against device memory

A kernel that performs fewer FLOP per byte than the ridge point cannot use all of the arithmetic (Williams, Waterman and
Patterson, CACM 52(4), 2009). The model in `tuner/cost/model.py` predicts a time; this says why it cannot be less.
"""

from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.precision import allows_tf32
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.breakdown import CostBreakdown
from blocktune.tuner.cost.iterations import matrix_rate
from blocktune.tuner.occupancy.calculator import Occupancy
from blocktune.tuner.occupancy.waves import Waves
from blocktune.tuner.traffic.model import Traffic

FIRST_BF16 = (8, 0)
"""Compute capability of the first GPUs with units for bf16: Ampere."""


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


def roofline(
    shape: AttentionShape,
    traffic: Traffic,
    device: DeviceSpec,
    *,
    density: float = 1.0,
    instruction: str | None = None,
) -> Roofline:
    """Return the problem with one algorithm's traffic under the ceilings of a device.

    Args:
        shape: the problem.
        traffic: of one algorithm.
        device: with its rates.
        density: the share of pairs that a block mask leaves, which the shape does not know.
        instruction: of the code's matrix products, `none` for plain multiply-adds; None is what Triton uses there.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    return Roofline(
        flops=round(shape.flops * density),
        hbm_bytes=traffic.total_bytes,
        peak_tflops=peak_tflops(device, shape.dtype, instruction or device.limits.mma),
        memory_gbs=_device_rate(device, "memory_gbs"),
    )


def peak_tflops(device: DeviceSpec, dtype: str, instruction: str) -> float:
    """Return the peak rate of matrix products of a type: of tensor cores, or of plain multiply-adds, which are as fast
    in every type. Where the rate of tensor cores is not advertised, it is derived from the clock.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    if instruction == "none":
        return 2 * device.limits.multiply_adds_per_clock * device.num_sms * _device_rate(device, "clock_mhz") / 1e6
    peak = device.tensor_tflops
    if peak is None and device.tensor_flops_per_clock and device.clock_mhz:
        peak = device.tensor_flops_per_clock * device.num_sms * device.clock_mhz / 1e6
    return (peak or _device_rate(device, "tensor_tflops")) * matrix_rate(dtype)


def library_instruction(dtype: str) -> str:
    """Return how PyTorch multiplies: on tensor cores, but float32 only where its settings allow TF32."""
    return "none" if dtype == "float32" and not allows_tf32() else "mma"


def missing_rates(device: DeviceSpec) -> tuple[str, ...]:
    """Return the rates that a prediction needs and this device lacks."""
    names = ("tensor_flops_per_clock", "clock_mhz", "memory_gbs")
    return tuple(name for name in names if getattr(device, name) is None)


def has_units(dtype: str, device: DeviceSpec) -> bool:
    """Return whether a GPU computes in a data type by units of its own: before Ampere none does in bfloat16."""
    return dtype != "bfloat16" or device.limits.cc >= FIRST_BF16


def require_units(dtype: str, device: DeviceSpec) -> None:
    """Check that a GPU has units for a data type.

    Raises:
        UsageError: it has none.
    """
    if not has_units(dtype, device):
        raise UsageError(
            f"{device.name} (compute capability {device.limits.name}) has no units for {dtype}: it would compute it "
            "slowly in others. Take float16: --dtype fp16."
        )


def require_rates(device: DeviceSpec) -> None:
    """Check that the device has every rate that a prediction needs.

    Raises:
        UsageError: a rate that a prediction needs is unknown.
    """
    missing = missing_rates(device)
    if missing:
        raise UsageError(
            f"Nothing can be predicted for {device.name}: its {', '.join(missing)} is unknown. Add its row to "
            "kernels/hardware/gpus.csv, or name a similar device of `tune devices`."
        )


def ridge_point(device: DeviceSpec) -> float:
    """Return FLOP per byte at which a device's 16-bit matrix products, as Triton makes them, take as long as memory.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    return peak_tflops(device, "bfloat16", device.limits.mma) * 1e3 / _device_rate(device, "memory_gbs")


def block_intensity(shape: AttentionShape, block_m: int) -> float:
    """Return FLOP that a block performs for every byte of keys and values it reads, from wherever they come: 2 rows /
    element size. It depends neither on the head dimension nor on block_n, so block_m is the knob of bandwidth. Rows
    past the last query count for nothing, which leaves decode with about 1."""
    return 2 * min(block_m, shape.seqlen_q) / shape.element_bytes


def exp_over_products(breakdown: CostBreakdown) -> float:
    """Return the time of the exponentials over that of the matrix products. Near 1 and above, a kernel must overlap
    both."""
    return breakdown.exp_us / breakdown.tensor_us


def waves_of(shape: AttentionShape, block_m: int, occupied: Occupancy, num_sms: int) -> Waves:
    """Return the waves of a forward grid: a block for every query tile of every head.

    Raises:
        UsageError: no block fits an SM.
    """
    if occupied.blocks_per_sm == 0:
        raise UsageError("The block does not fit an SM, so it has no waves. Take smaller blocks.")
    tiles = -(-shape.seqlen_q // block_m)
    return Waves(grid_blocks=tiles * shape.batch * shape.num_heads, resident_blocks=occupied.blocks_per_sm * num_sms)


def _device_rate(device: DeviceSpec, name: str) -> float:
    """Return a rate of the device.

    Raises:
        UsageError: it is unknown.
    """
    rate: float | None = getattr(device, name)
    if rate is None:
        raise UsageError(
            f"{device.name} has no roofline: its {name} is unknown. Add its row to kernels/hardware/gpus.csv, or name "
            "a similar device of `tune devices`."
        )
    return rate
