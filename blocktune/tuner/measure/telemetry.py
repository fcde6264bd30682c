"""The state of a GPU by NVML, and the lock that keeps two measurements off one GPU."""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from blocktune.db.records.records import Telemetry
from blocktune.kernels.hardware.catalogue import entry_by_driver_name
from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.kernels.hardware.nvml import Nvml, NvmlGpu, canonical_uuid
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.measure.lock_file import Patience, acquire_lock, open_lock_file

_log = logging.getLogger(__name__)

_HEAT_OR_POWER_FAULT = 0x08 | 0x20 | 0x40 | 0x80
"""Clock event reasons of `nvml.h`: hardware slowdown, software and hardware thermal slowdown, hardware power brake. The
power cap (0x04) is left out: large GPUs run into it whenever they work."""


@functools.cache
def _nvml() -> Nvml | None:
    """Return NVML, open until the process ends; None where there is none."""
    return Nvml.open()


@functools.cache
def _warn_without_nvml() -> None:
    _log.warning("No GPU telemetry: NVML does not answer. Clocks and temperatures stay unknown.")


def nvml_devices() -> tuple[DeviceSpec, ...]:
    """Return the GPUs that NVML sees, whether or not CUDA may use them; none without NVML.

    NVML tells neither multiprocessors nor shared memory: those come from the catalogue, by the exact name. A GPU that
    the catalogue does not hold is left out and named in the log.
    """
    nvml = _nvml()
    specs = (_spec_of(gpu) for gpu in (nvml.gpus() if nvml is not None else ()))
    return tuple(spec for spec in specs if spec is not None)


def _spec_of(gpu: NvmlGpu) -> DeviceSpec | None:
    name, cc = gpu.name, gpu.compute_capability
    entry = entry_by_driver_name(name) if name else None
    if entry is None or (cc or entry.cc) != entry.cc:
        _log.warning("NVML sees %r of compute capability %s, which kernels/hardware/gpus.csv does not hold.", name, cc)
        return None
    return replace(device_named(entry.id), source="nvml", uuid=gpu.uuid)


class GpuMonitor:
    """Reads one GPU's clocks, heat, power and other users. Without NVML everything it says is unknown.

    own_processes: how many of the GPU's users are ours, such as the worker that measures. Process ids do not
    identify them, since NVML counts those outside of containers.
    """

    def __init__(self, uuid: str | None, *, own_processes: int = 0):
        self._own_processes = own_processes
        nvml = _nvml() if uuid is not None else None
        if uuid is not None and nvml is None:
            _warn_without_nvml()
        self._gpu = nvml.gpu(uuid) if nvml is not None and uuid is not None else None

    @property
    def power_limit_w(self) -> int:
        """The enforced power limit in watts; 0 when unknown."""
        limit = self._gpu.power_limit_w if self._gpu is not None else None
        return round(limit or 0)

    def energy_j(self) -> float | None:
        """Return the energy in joules that the GPU has used since its driver was loaded; None when unknown."""
        return self._gpu.energy_j if self._gpu is not None else None

    def sample(self) -> Telemetry:
        """Return the state now."""
        gpu = self._gpu
        if gpu is None:
            return Telemetry()
        users = gpu.num_processes
        return Telemetry(
            sm_clock_mhz=gpu.sm_clock_mhz,
            memory_clock_mhz=gpu.memory_clock_mhz,
            temperature_c=gpu.temperature_c,
            power_w=gpu.power_w,
            throttle_reasons=gpu.throttle_reasons,
            other_processes=None if users is None else max(0, users - self._own_processes),
        )


def require_energy(device: DeviceSpec) -> None:
    """Check that a GPU tells its energy.

    Raises:
        UsageError: it does not, or it is not here.
    """
    if GpuMonitor(device.uuid).energy_j() is None:
        raise UsageError(
            "The objective energy needs a GPU in this machine that reports its energy through NVML, but "
            f"{device.name} does not. Use `--objective time`."
        )


def disturbance(sample: Telemetry) -> str:
    """Return what was wrong with the GPU when this was taken, for people; empty when nothing was."""
    words = []
    if sample.other_processes:
        words.append("another process was on the GPU")
    if (sample.throttle_reasons or 0) & _HEAT_OR_POWER_FAULT:
        words.append("the GPU slowed itself down")
    return " and ".join(words)


def disturbances(samples: Iterable[Telemetry]) -> tuple[str, ...]:
    """Return what was wrong with the GPU while these were taken, for people; empty when nothing was."""
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
def gpu_lock(uuid: str | None, on_wait: Callable[[str], None], patience: Patience | None = None) -> Iterator[bool]:
    """Hold the GPU for measuring, among this user's processes; gives False if another one holds it for too long.

    The lock is a file that the operating system releases when the process ends, however it ends. Without a UUID there
    is nothing to lock, and where no file can be locked nothing keeps others off the GPU.

    Args:
        uuid: of the GPU.
        on_wait: called with a message once the wait takes long, or where there is no lock.
        patience: how long to wait; without an end unless given.
    """
    is_free = True
    with contextlib.ExitStack() as stack:
        try:
            if uuid is not None:
                digest = hashlib.sha256(canonical_uuid(uuid).encode()).hexdigest()[:16]
                file = stack.enter_context(open_lock_file(f"gpu-{digest}"))
                held = f"{{}} measures on the GPU {canonical_uuid(uuid)}; waiting for it."
                is_free = acquire_lock(file, patience or Patience(), lambda holder: on_wait(held.format(holder)))
        except Exception as error:  # a home that cannot be written, or a file system without locks
            cause = f"{type(error).__name__}: {error}"
            on_wait(f"Nothing keeps other tuning runs off the GPU, since no file can be locked: {cause}.")
        yield is_free
