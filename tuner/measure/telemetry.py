"""The state of a GPU by NVML, and the lock that keeps two measurements off one GPU.

Everything here finds a GPU by its UUID: NVML's index ignores CUDA_VISIBLE_DEVICES and its order differs from CUDA's.
Whatever NVML cannot answer, on this driver or this GPU, is None.
"""

import contextlib
import fcntl
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from blocktune.db.records.records import Telemetry
from blocktune.kernels.hardware.catalogue import entry_by_driver_name
from blocktune.kernels.hardware.device import DeviceSpec, device_named

_log = logging.getLogger(__name__)

_MILLI = 1000  # NVML counts milliwatts and millijoules
_HEAT_OR_POWER_FAULT = 0x08 | 0x20 | 0x40 | 0x80
"""Clock event reasons of `nvml.h`: hardware slowdown, software and hardware thermal slowdown, hardware power brake. The
power cap (0x04) is left out: large GPUs run into it whenever they work."""


@functools.cache
def _nvml() -> Any | None:
    """The initialised pynvml module, or None, said once, where there is no NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.warning("No GPU telemetry: NVML does not answer (%s). Clocks and temperatures stay unknown.", error)
        return None
    return pynvml


def _ask(function: Callable[..., Any], *arguments: Any) -> Any | None:
    """NVML's answer, or None where this GPU, driver or user has none."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def nvml_devices() -> tuple[DeviceSpec, ...]:
    """The GPUs that NVML sees, whether or not CUDA may use them; empty without NVML.

    NVML tells neither multiprocessors nor shared memory: those come from the catalogue, by the exact name. A GPU that
    the catalogue does not hold is left out and named in the log.
    """
    nvml = _nvml()
    if nvml is None:
        return ()
    handles = (_ask(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(_ask(nvml.nvmlDeviceGetCount) or 0))
    specs = (_spec_of(nvml, handle) for handle in handles if handle is not None)
    return tuple(spec for spec in specs if spec is not None)


def _spec_of(nvml: Any, handle: Any) -> DeviceSpec | None:
    name, uuid = _ask(nvml.nvmlDeviceGetName, handle), _ask(nvml.nvmlDeviceGetUUID, handle)
    cc = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    entry = entry_by_driver_name(name) if name else None
    if entry is None or tuple(cc or entry.cc) != entry.cc:
        _log.warning("NVML sees %r of compute capability %s, which kernels/hardware/gpus.csv does not hold.", name, cc)
        return None
    return replace(device_named(entry.id), source="nvml", uuid=uuid)


def driver_version() -> str:
    """The driver's version as NVML tells it, such as `580.65.06`; empty when unknown."""
    nvml = _nvml()
    return str(_ask(nvml.nvmlSystemGetDriverVersion) or "") if nvml is not None else ""


def canonical_uuid(uuid: str) -> str:
    """NVML's spelling: torch leaves out the `GPU-` in front. A MIG slice keeps its `MIG-`."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class GpuMonitor:
    """Reads one GPU's clocks, heat, power and other users. Without NVML everything it says is unknown.

    own_processes: how many of the GPU's users are ours, such as the worker that measures. Process ids do not
    identify them, since NVML counts those outside of containers.
    """

    def __init__(self, uuid: str | None, *, own_processes: int = 0):
        self._own_processes = own_processes
        self._nvml = _nvml() if uuid is not None else None
        self._handle = None
        if self._nvml is not None and uuid is not None:
            self._handle = _ask(self._nvml.nvmlDeviceGetHandleByUUID, canonical_uuid(uuid))

    @property
    def power_limit_w(self) -> int:
        """The enforced power limit in watts; 0 when unknown."""
        if self._nvml is None or self._handle is None:
            return 0
        limit = _ask(self._nvml.nvmlDeviceGetEnforcedPowerLimit, self._handle)
        return round(limit / _MILLI) if limit else 0

    def energy_j(self) -> float | None:
        """Return the energy in joules that the GPU has used since its driver was loaded; None when unknown."""
        if self._nvml is None or self._handle is None:
            return None
        energy_mj = _ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if energy_mj is None else energy_mj / _MILLI

    def sample(self) -> Telemetry:
        """The state now."""
        nvml, handle = self._nvml, self._handle
        if nvml is None or handle is None:
            return Telemetry()
        power = _ask(nvml.nvmlDeviceGetPowerUsage, handle)
        users = _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return Telemetry(
            sm_clock_mhz=_ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=_ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature_c=_ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / _MILLI,
            throttle_reasons=_ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            other_processes=None if users is None else max(0, len(users) - self._own_processes),
        )


def disturbance(sample: Telemetry) -> str:
    """What was wrong with the GPU when this was taken, for people; empty when nothing was."""
    words = []
    if sample.other_processes:
        words.append("another process was on the GPU")
    if (sample.throttle_reasons or 0) & _HEAT_OR_POWER_FAULT:
        words.append("the GPU slowed itself down")
    return " and ".join(words)


def disturbances(samples: Iterable[Telemetry]) -> tuple[str, ...]:
    """What was wrong with the GPU while these were taken, for people; empty when nothing was."""
    taken = list(samples)
    shared = sum(bool(sample.other_processes) for sample in taken)
    hot = sum(bool((sample.throttle_reasons or 0) & _HEAT_OR_POWER_FAULT) for sample in taken)
    notes = []
    if shared:
        notes.append(f"other processes used the GPU during {shared} of {len(taken)} trials; tune again when it is free")
    if hot:
        notes.append(f"the GPU slowed itself down during {hot} of {len(taken)} trials; look at its cooling and power")
    return tuple(notes)


@contextlib.contextmanager
def gpu_lock(uuid: str | None, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the GPU for measuring, among this user's processes; calls `on_wait` with a message before it has to wait.

    The lock is a file that the operating system releases when the process ends, however it ends. Without a UUID there
    is nothing to lock.
    """
    if uuid is None:
        yield
        return
    path = Path(platformdirs.user_cache_dir("blocktune", appauthor=False)) / "locks"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = hashlib.sha256(canonical_uuid(uuid).encode()).hexdigest()[:16]
    with (path / f"gpu-{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(f"Another tuning run holds the GPU {canonical_uuid(uuid)}; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
