"""What NVML knows and CUDA does not: the driver's version, power limits, and how a GPU works at the moment.

NVML comes with the driver and is read through `pynvml`. Where either is missing, or where NVML does not answer on this
driver or GPU, a value is unknown and nothing is an error.

A GPU is found by its UUID: NVML's index ignores CUDA_VISIBLE_DEVICES, and its order differs from CUDA's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

_MILLI = 1000  # NVML counts milliwatts and millijoules


@dataclass(frozen=True, slots=True)
class Nvml:
    """An initialised NVML: the module `pynvml`."""

    pynvml: Any

    @classmethod
    def open(cls) -> Self | None:
        """Return NVML, initialised; None where there is none."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, an odd one, or no NVML: attention needs torch and Triton only
            return None
        return cls(pynvml)

    def close(self) -> None:
        """Let NVML go."""
        self.answer("nvmlShutdown")

    def driver_version(self) -> str | None:
        """Return the version, such as `580.65.06`. CUDA knows only the newest CUDA that the driver supports."""
        return self.answer("nvmlSystemGetDriverVersion")

    def gpu(self, uuid: str) -> "NvmlGpu | None":
        """Return the GPU with this UUID."""
        return self._gpu("nvmlDeviceGetHandleByUUID", canonical_uuid(uuid))

    def gpus(self) -> list["NvmlGpu"]:
        """Return all GPUs, whether or not CUDA may use them."""
        count = self.answer("nvmlDeviceGetCount") or 0
        found = (self._gpu("nvmlDeviceGetHandleByIndex", index) for index in range(count))
        return [gpu for gpu in found if gpu is not None]

    def answer(self, function: str, *arguments: Any) -> Any | None:
        """Return what a function of `pynvml` returns; None where it fails, or where this driver or package lacks it.
        Old packages return bytes for texts."""
        try:
            found = getattr(self.pynvml, function)(*arguments)
            return found.decode() if isinstance(found, bytes) else found
        except Exception:  # packages of that name differ in what they raise
            return None

    def _gpu(self, function: str, key: str | int) -> "NvmlGpu | None":
        handle = self.answer(function, key)
        return None if handle is None else NvmlGpu(self, handle)


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU. What it does not tell is None."""

    nvml: Nvml
    handle: Any

    @property
    def name(self) -> str | None:
        return self._answer("nvmlDeviceGetName")

    @property
    def uuid(self) -> str | None:
        return self._answer("nvmlDeviceGetUUID")

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        return self._answer("nvmlDeviceGetCudaComputeCapability")

    @property
    def sm_clock_mhz(self) -> int | None:
        return self._answer("nvmlDeviceGetClockInfo", self.nvml.pynvml.NVML_CLOCK_SM)

    @property
    def memory_clock_mhz(self) -> int | None:
        return self._answer("nvmlDeviceGetClockInfo", self.nvml.pynvml.NVML_CLOCK_MEM)

    @property
    def temperature_c(self) -> int | None:
        return self._answer("nvmlDeviceGetTemperature", self.nvml.pynvml.NVML_TEMPERATURE_GPU)

    @property
    def power_w(self) -> float | None:
        """The power draw: on large GPUs a mean over the last second."""
        return _from_milli(self._answer("nvmlDeviceGetPowerUsage"))

    @property
    def power_limit_w(self) -> float | None:
        """The enforced power limit."""
        return _from_milli(self._answer("nvmlDeviceGetEnforcedPowerLimit"))

    @property
    def energy_j(self) -> float | None:
        """The energy used since the driver was loaded."""
        return _from_milli(self._answer("nvmlDeviceGetTotalEnergyConsumption"))

    @property
    def throttle_reasons(self) -> int | None:
        """What lowers the clocks at the moment, as bits of `nvml.h`."""
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons")

    @property
    def num_processes(self) -> int | None:
        """How many processes compute on it."""
        # without `_v3`, newer pynvml raises an error that is no NVMLError on a driver that lacks the function
        processes = self._answer("nvmlDeviceGetComputeRunningProcesses_v3")
        return None if processes is None else len(processes)

    def _answer(self, function: str, *arguments: Any) -> Any | None:
        return self.nvml.answer(function, self.handle, *arguments)


@cache
def driver_version() -> str:
    """Return the driver's version; empty when unknown."""
    with _open_nvml() as nvml:
        return (nvml.driver_version() if nvml is not None else None) or ""


def gpu_uuids() -> tuple[str, ...]:
    """Return the UUIDs of all GPUs of the machine; none where NVML does not answer."""
    with _open_nvml() as nvml:
        found = [gpu.uuid for gpu in nvml.gpus()] if nvml is not None else []
    return tuple(uuid for uuid in found if uuid is not None)


@cache
def power_limit_w(uuid: str | None) -> int:
    """Return the enforced power limit in watts of the GPU with this UUID; 0 when unknown, as for a slice of one."""
    with _open_nvml() as nvml:
        gpu = nvml.gpu(uuid) if nvml is not None and uuid is not None else None
        return round((gpu.power_limit_w if gpu is not None else None) or 0)


def canonical_uuid(uuid: str) -> str:
    """Return NVML's spelling: torch leaves out the `GPU-` in front. A MIG slice keeps its `MIG-`."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


@contextmanager
def _open_nvml() -> Iterator[Nvml | None]:
    nvml = Nvml.open()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.close()


def _from_milli(value: int | None) -> float | None:
    return None if value is None else value / _MILLI
