"""Devices in the report: the limits of every compute capability, and the ceilings of a device."""

from dataclasses import asdict
from typing import Any

from blocktune.kernels.hardware.catalogue import catalogue
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import (
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_BLOCK,
    REGISTER_UNIT,
    WARP_SIZE,
    ComputeLimits,
    known_ccs,
    limits_for,
)
from blocktune.tuner.cost.iterations import L2_BYTES_PER_CLOCK
from blocktune.tuner.cost.roofline import missing_rates, peak_tflops

HARDWARE = {
    "warp_size": WARP_SIZE,
    "register_unit": REGISTER_UNIT,
    "max_registers_per_thread": MAX_REGISTERS_PER_THREAD,
    "max_threads_per_block": MAX_THREADS_PER_BLOCK,
}
"""What is the same on every device."""


def limits_table() -> dict[str, dict[str, Any]]:
    """Return the limits of every compute capability, by its name."""
    return {limits.name: limits_json(limits) for limits in map(limits_for, known_ccs())}


def limits_json(limits: ComputeLimits) -> dict[str, Any]:
    """Return the limits as plain values."""
    return asdict(limits) | {"cc": limits.name, "carveouts_kib": list(limits.carveouts_kib)}


def device_choices() -> list[dict[str, Any]]:
    """Return every device of the catalogue: its name and compute capability."""
    return [{"id": entry.id, "name": entry.name, "cc": f"{entry.cc[0]}.{entry.cc[1]}"} for entry in catalogue()]


def ceilings(device: DeviceSpec, dtype: str) -> dict[str, float] | None:
    """Return the ceilings of a device in TFLOP/s and GB/s; None where a rate is not known.

    The rate of L2 is what the cost model takes: `L2_BYTES_PER_CLOCK` for every multiprocessor.
    """
    if missing_rates(device):
        return None
    return {
        "peak_tflops": peak_tflops(device, dtype, device.limits.mma),
        "memory_gbs": float(device.memory_gbs or 0),
        "l2_gbs": L2_BYTES_PER_CLOCK * device.num_sms * float(device.clock_mhz or 0) / 1e3,
    }
