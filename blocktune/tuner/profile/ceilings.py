"""The ceilings of a device: what the catalogue says, and what this very card reaches.

catalogue_ceilings(device)["memory"].catalogue          # 4800.0 GB/s on an H200
measured_ceilings(device, print)["memory"].measured     # on that GPU
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec, current_device
from blocktune.kernels.values.errors import NoDeviceError
from blocktune.tuner.cost.iterations import L2_BYTES_PER_CLOCK
from blocktune.tuner.cost.roofline import library_instruction, peak_tflops, require_rates
from blocktune.tuner.measure.telemetry import gpu_lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The most that a device does of one thing. unit: of both numbers; measured: None where it was not."""

    title: str
    unit: str
    catalogue: float
    measured: float | None = None

    @property
    def share(self) -> float | None:
        """What was measured over what the catalogue says."""
        return None if self.measured is None else self.measured / self.catalogue

    @property
    def known(self) -> float:
        """The measured ceiling, else that of the catalogue."""
        return self.catalogue if self.measured is None else self.measured

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}


Ceilings = Mapping[str, Ceiling]
"""By name: `memory`, `l2`, `matrix` and `exp`."""


def catalogue_ceilings(device: DeviceSpec) -> dict[str, Ceiling]:
    """Return what the models take for the ceilings of a device, at its boost clock.

    Raises:
        UsageError: a rate of the device is unknown.
    """
    require_rates(device)
    clocks_ghz = device.num_sms * float(device.clock_mhz or 0) / 1e3
    return {
        "memory": Ceiling(title="device memory", unit="GB/s", catalogue=float(device.memory_gbs or 0)),
        "l2": Ceiling(title="L2, by the ports of the SMs", unit="GB/s", catalogue=L2_BYTES_PER_CLOCK * clocks_ghz),
        "matrix": Ceiling(
            title="matrix products of 16 bits",
            unit="TFLOP/s",
            catalogue=peak_tflops(device, "bfloat16", library_instruction("bfloat16")),
        ),
        "exp": Ceiling(title="exponentials", unit="Texp/s", catalogue=device.limits.exp_per_clock * clocks_ghz / 1e3),
    }


def measured_ceilings(device: DeviceSpec, tell: Callable[[str], None]) -> dict[str, Ceiling]:
    """Return the ceilings of the catalogue with those that the current GPU reaches. It takes some seconds.

    Args:
        device: the current GPU.
        tell: takes a message before the GPU is waited for, and in front of every measurement.

    Raises:
        NoDeviceError: the device is not the current GPU, or there is none.
        UsageError: a rate of the device is unknown.
    """
    here = _current(device)
    found = catalogue_ceilings(here)

    from blocktune.tuner.measure.clock import CudaClock
    from blocktune.tuner.profile.probes import probes_here

    with gpu_lock(here.uuid, tell):
        clock = CudaClock()
        for name, probe in probes_here().items():
            tell(f"measuring: {found[name].title}")
            rate = probe().best_rate(clock)
            found[name] = replace(found[name], measured=rate if found[name].unit == "GB/s" else rate / 1e3)
    return found


def _current(device: DeviceSpec) -> DeviceSpec:
    try:
        here = current_device()
    except NoDeviceError as error:
        raise NoDeviceError(f"{error} Without --measure, `tune roofline` shows the catalogue's ceilings.") from error
    if here.key != device.key:
        raise NoDeviceError(
            f"Ceilings are measured on the current GPU, {here.name}, but got {device.name}. Leave out `--device`, or "
            "leave out `--measure` for the catalogue's figures."
        )
    return here
