"""The driver's version and power limits, which NVML, a library that comes with the driver, knows and CUDA does not.

By ctypes, since the production path needs no pynvml. Where there is no NVML, all is unknown and nothing an error.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEXT_BYTES = 96  # more than NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
_WATT = 1000  # NVML counts milliwatts


@cache
def driver_version() -> str:
    """The driver's version, such as `580.65.06`; empty when unknown. CUDA tells only the newest CUDA it supports."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    with _session() as nvml:
        if nvml is None or nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT_BYTES)) != _SUCCESS:
            return ""
    return text.value.decode(errors="replace")


@cache
def power_limit_w(uuid: str | None) -> int:
    """The enforced power limit in watts of the GPU with this UUID; 0 when unknown, as for a slice of one."""
    handle, milliwatts = ctypes.c_void_p(), ctypes.c_uint()
    with _session() as nvml:
        if nvml is None or uuid is None:
            return 0
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
            return 0
        if nvml.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(milliwatts)) != _SUCCESS:
            return 0
    return round(milliwatts.value / _WATT)


@contextmanager
def _session() -> Iterator[Any | None]:
    """The library, initialised; None without it."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != _SUCCESS:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()
