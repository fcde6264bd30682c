"""What NVML knows and CUDA does not: the driver's version, power limits, and how a GPU works at the moment.

NVML comes with the driver; it is called by ctypes, so that nothing needs to be installed for it. Where there is no
NVML, or where it does not answer on this driver or GPU, a value is unknown and nothing is an error.

A GPU is found by its UUID: NVML's index ignores CUDA_VISIBLE_DEVICES, and its order differs from CUDA's.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEXT_BYTES = 96  # as large as the largest of NVML's own sizes of a text
_MILLI = 1000  # NVML counts milliwatts and millijoules
_SM_CLOCK, _MEMORY_CLOCK = 1, 2  # nvmlClockType_t
_GPU_SENSOR = 0  # nvmlTemperatureSensors_t
_MOST_PROCESSES = 256


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_t` of the functions `_v2` and `_v3`."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Nvml:
    """An initialised NVML."""

    library: Any

    @classmethod
    def open(cls) -> Self | None:
        """Return NVML, initialised; None where there is none."""
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == _SUCCESS else None

    def close(self) -> None:
        """Let NVML go."""
        self.library.nvmlShutdown()

    def driver_version(self) -> str | None:
        """Return the version, such as `580.65.06`. CUDA knows only the newest CUDA that the driver supports."""
        return self.text("nvmlSystemGetDriverVersion")

    def gpu(self, uuid: str) -> "NvmlGpu | None":
        """Return the GPU with this UUID."""
        return self._gpu("nvmlDeviceGetHandleByUUID", canonical_uuid(uuid).encode())

    def gpus(self) -> list["NvmlGpu"]:
        """Return all GPUs, whether or not CUDA may use them."""
        count = self.number("nvmlDeviceGetCount_v2", ctypes.c_uint) or 0
        found = (self._gpu("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index)) for index in range(count))
        return [gpu for gpu in found if gpu is not None]

    def succeeds(self, function: str, *arguments: Any) -> bool:
        """Call a function; say whether this driver has it and it answered."""
        call = getattr(self.library, function, None)
        return call is not None and call(*arguments) == _SUCCESS

    def number(self, function: str, kind: type[Any], *arguments: Any) -> int | None:
        """Return the number of this ctypes kind that a function writes through its last argument."""
        answer = kind()
        return answer.value if self.succeeds(function, *arguments, ctypes.byref(answer)) else None

    def text(self, function: str, *arguments: Any) -> str | None:
        """Return the text that a function writes through its last argument."""
        answer = ctypes.create_string_buffer(_TEXT_BYTES)
        answered = self.succeeds(function, *arguments, answer, ctypes.c_uint(_TEXT_BYTES))
        return answer.value.decode(errors="replace") if answered else None

    def _gpu(self, function: str, key: Any) -> "NvmlGpu | None":
        handle = ctypes.c_void_p()
        return NvmlGpu(self, handle) if self.succeeds(function, key, ctypes.byref(handle)) else None


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU. What it does not tell is None."""

    nvml: Nvml
    handle: ctypes.c_void_p

    @property
    def name(self) -> str | None:
        return self.nvml.text("nvmlDeviceGetName", self.handle)

    @property
    def uuid(self) -> str | None:
        return self.nvml.text("nvmlDeviceGetUUID", self.handle)

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        pair = ctypes.byref(major), ctypes.byref(minor)
        told = self.nvml.succeeds("nvmlDeviceGetCudaComputeCapability", self.handle, *pair)
        return (major.value, minor.value) if told else None

    @property
    def sm_clock_mhz(self) -> int | None:
        return self.nvml.number("nvmlDeviceGetClockInfo", ctypes.c_uint, self.handle, _SM_CLOCK)

    @property
    def memory_clock_mhz(self) -> int | None:
        return self.nvml.number("nvmlDeviceGetClockInfo", ctypes.c_uint, self.handle, _MEMORY_CLOCK)

    @property
    def temperature_c(self) -> int | None:
        return self.nvml.number("nvmlDeviceGetTemperature", ctypes.c_uint, self.handle, _GPU_SENSOR)

    @property
    def power_w(self) -> float | None:
        """The power draw: on large GPUs a mean over the last second."""
        return _from_milli(self.nvml.number("nvmlDeviceGetPowerUsage", ctypes.c_uint, self.handle))

    @property
    def power_limit_w(self) -> float | None:
        """The enforced power limit."""
        return _from_milli(self.nvml.number("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint, self.handle))

    @property
    def energy_j(self) -> float | None:
        """The energy used since the driver was loaded."""
        return _from_milli(self.nvml.number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, self.handle))

    @property
    def throttle_reasons(self) -> int | None:
        """What lowers the clocks at the moment, as bits of `nvml.h`."""
        return self.nvml.number("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong, self.handle)

    @property
    def num_processes(self) -> int | None:
        """How many processes compute on it."""
        # an array that is too small, or missing, gets the size to make it, which is more than there are
        count = ctypes.c_uint(_MOST_PROCESSES)
        array = (_Process * _MOST_PROCESSES)()
        pair = ctypes.byref(count), array
        told = self.nvml.succeeds("nvmlDeviceGetComputeRunningProcesses_v3", self.handle, *pair)
        return count.value if told else None


@cache
def driver_version() -> str:
    """Return the driver's version; empty when unknown."""
    with _opened() as nvml:
        return (nvml.driver_version() if nvml is not None else None) or ""


@cache
def power_limit_w(uuid: str | None) -> int:
    """Return the enforced power limit in watts of the GPU with this UUID; 0 when unknown, as for a slice of one."""
    with _opened() as nvml:
        gpu = nvml.gpu(uuid) if nvml is not None and uuid is not None else None
        return round((gpu.power_limit_w if gpu is not None else None) or 0)


def canonical_uuid(uuid: str) -> str:
    """Return NVML's spelling: torch leaves out the `GPU-` in front. A MIG slice keeps its `MIG-`."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


@contextmanager
def _opened() -> Iterator[Nvml | None]:
    nvml = Nvml.open()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.close()


def _from_milli(value: int | None) -> float | None:
    return None if value is None else value / _MILLI
