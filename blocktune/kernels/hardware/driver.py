"""What the CUDA driver says about the GPUs that are present, by ctypes: no context, no torch, no compiler.

The driver itself honours CUDA_VISIBLE_DEVICES, once, at the first call of a process. Like every use of CUDA, a call
here makes the process unfit for `fork`: child processes that use the GPU must be spawned.
"""

import ctypes
import ctypes.util
import sys
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

CUDA_SUCCESS = 0
CUDA_ERROR_NO_DEVICE = 100

# CUdevice_attribute of cuda.h
_ATTRIBUTES = {
    "registers_per_block": 12,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "max_threads_per_sm": 39,
    "shared_per_sm_bytes": 81,
    "registers_per_sm": 82,
    "shared_per_block_optin_bytes": 97,
    "max_blocks_per_sm": 106,
    "shared_reserved_bytes": 111,
}
_NUM_SMS, _CC_MAJOR, _CC_MINOR = 16, 75, 76


class DriverLibrary(Protocol):
    """The functions of libcuda that are called here; `ctypes.CDLL` has them, and a test's fake."""

    def __getattr__(self, name: str) -> Any: ...


class DriverCallError(Exception):
    """A call of the driver failed; caught by `read_driver`, which reports it."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with CUDA error {code}")
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDevice:
    """The attributes of one present GPU; None is an attribute that this driver (or torch) does not tell."""

    index: int
    name: str
    cc: tuple[int, int]
    num_sms: int
    uuid: str | None = None
    memory_bytes: int | None = None
    max_threads_per_sm: int | None = None
    max_blocks_per_sm: int | None = None
    registers_per_sm: int | None = None
    registers_per_block: int | None = None
    shared_per_sm_bytes: int | None = None
    shared_per_block_optin_bytes: int | None = None
    shared_reserved_bytes: int | None = None
    l2_bytes: int | None = None
    clock_khz: int | None = None
    memory_clock_khz: int | None = None
    memory_bus_bits: int | None = None

    @property
    def memory_gbs(self) -> float | None:
        """Peak memory bandwidth in GB/s: two transfers a clock. None where the driver reports no clock or width."""
        if not self.memory_clock_khz or not self.memory_bus_bits:
            return None
        return 2 * self.memory_clock_khz * 1000 * self.memory_bus_bits / 8 / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    """The GPUs and the state of the driver. cuda_version: the newest CUDA it supports, such as (12, 8). problem: why
    there are no devices, empty when there are. source: `driver` or `torch`."""

    devices: tuple[LiveDevice, ...] = ()
    cuda_version: tuple[int, int] | None = None
    problem: str = ""
    source: str = "driver"


def load_library() -> DriverLibrary | None:
    """Return libcuda, or None where no NVIDIA driver is installed."""
    for name in ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue  # not under this name
    return None


def read_driver(library: DriverLibrary | None = None) -> DriverReport:
    """Ask the driver for its GPUs. Never raises: whatever is wrong is in the report's `problem`.

    Args:
        library: libcuda or a stand-in; None loads the real one.
    """
    library = library or load_library()
    if library is None:
        return DriverReport(problem="No NVIDIA driver is installed: libcuda could not be loaded.")
    version = None
    try:
        version = _cuda_version(library)
        _check(library, "cuInit", 0)
        devices = tuple(_read_device(library, index) for index in range(_read_int(library, "cuDeviceGetCount")))
    except DriverCallError as error:
        return DriverReport(cuda_version=version, problem=_explain_error(error))
    if not devices:
        return DriverReport(cuda_version=version, problem=_NO_DEVICE)
    return DriverReport(devices=devices, cuda_version=version)


def read_torch() -> DriverReport:
    """Return the GPUs as torch sees them, for a system where torch finds the driver and `load_library` does not.

    It asks only a torch that is loaded already: importing it takes seconds, and a CPU-only machine would pay them.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or torch.version.cuda is None:
        return DriverReport(problem="torch has no CUDA device.", source="torch")
    devices = tuple(_torch_device(torch, index) for index in range(torch.cuda.device_count()))
    return DriverReport(devices=devices, source="torch")


_NO_DEVICE = "The NVIDIA driver sees no GPU; CUDA_VISIBLE_DEVICES may hide it."
_PROBLEMS = {
    3: "The NVIDIA driver is not initialised; a forked child cannot use the CUDA of its parent.",
    34: "libcuda is the toolkit's stub, not a driver: take its folder out of LD_LIBRARY_PATH.",
    CUDA_ERROR_NO_DEVICE: _NO_DEVICE,
    802: "The GPU system is not ready yet: start nvidia-fabricmanager on NVSwitch machines.",
    803: "The NVIDIA driver's libcuda and its kernel module have different versions: reboot, or fix the installation.",
    804: "The forward-compatibility libcuda does not support this GPU: take it out of LD_LIBRARY_PATH.",
}


def _explain_error(error: DriverCallError) -> str:
    known = _PROBLEMS.get(error.code, "The NVIDIA driver does not work.")
    return f"{known} ({error})"


def _check(library: DriverLibrary, function: str, *args: Any) -> None:
    code = getattr(library, function)(*args)
    if code != CUDA_SUCCESS:
        raise DriverCallError(function, code)


def _read_int(library: DriverLibrary, function: str, *args: Any) -> int:
    value = ctypes.c_int()
    _check(library, function, ctypes.byref(value), *args)
    return value.value


def _cuda_version(library: DriverLibrary) -> tuple[int, int]:
    number = _read_int(library, "cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def _read_device(library: DriverLibrary, index: int) -> LiveDevice:
    device = _read_int(library, "cuDeviceGet", index)
    attributes = {name: _attribute(library, device, number) for name, number in _ATTRIBUTES.items()}
    num_sms, major, minor = (
        _read_int(library, "cuDeviceGetAttribute", number, device) for number in (_NUM_SMS, _CC_MAJOR, _CC_MINOR)
    )
    return LiveDevice(
        index=index,
        name=_name(library, device),
        cc=(major, minor),
        num_sms=num_sms,
        uuid=_uuid(library, device),
        memory_bytes=_memory_bytes(library, device),
        **attributes,
    )


def _attribute(library: DriverLibrary, device: int, number: int) -> int | None:
    """Return one attribute; None where this driver is too old to know it."""
    value = ctypes.c_int()
    code = library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return value.value if code == CUDA_SUCCESS else None


def _name(library: DriverLibrary, device: int) -> str:
    buffer = ctypes.create_string_buffer(256)
    _check(library, "cuDeviceGetName", buffer, len(buffer), device)
    return buffer.value.decode("utf-8", "replace")


def _uuid(library: DriverLibrary, device: int) -> str:
    """Return the UUID as NVML prints it. `_v2` (CUDA 11.4) tells the slices of a partitioned GPU apart."""
    buffer = (ctypes.c_ubyte * 16)()
    function = "cuDeviceGetUuid_v2" if hasattr(library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    _check(library, function, ctypes.byref(buffer), device)
    return f"GPU-{uuid.UUID(bytes=bytes(buffer))}"


def _memory_bytes(library: DriverLibrary, device: int) -> int:
    value = ctypes.c_size_t()
    _check(library, "cuDeviceTotalMem_v2", ctypes.byref(value), device)
    return value.value


def _torch_device(torch: Any, index: int) -> LiveDevice:
    """Return torch's properties; which of them exist depends on its version, so each is optional."""
    properties = torch.cuda.get_device_properties(index)
    identity = getattr(properties, "uuid", None)
    return LiveDevice(
        index=index,
        name=properties.name,
        cc=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        uuid=f"GPU-{identity}" if identity is not None else None,
        memory_bytes=properties.total_memory,
        max_threads_per_sm=getattr(properties, "max_threads_per_multi_processor", None),
        registers_per_sm=getattr(properties, "regs_per_multiprocessor", None),
        shared_per_sm_bytes=getattr(properties, "shared_memory_per_multiprocessor", None),
        shared_per_block_optin_bytes=getattr(properties, "shared_memory_per_block_optin", None),
        l2_bytes=getattr(properties, "L2_cache_size", None),
        clock_khz=getattr(properties, "clock_rate", None),
        memory_clock_khz=getattr(properties, "memory_clock_rate", None),
        memory_bus_bits=getattr(properties, "memory_bus_width", None),
    )
