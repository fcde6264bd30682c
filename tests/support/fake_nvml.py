"""NVML with one GPU, for tests: C functions that write their answers through the pointers they get."""

import ctypes
from typing import Any

UUID = "GPU-11111111-2222-3333-4444-555555555555"
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, UNINITIALIZED = 3, 6, 7, 1
HANDLE = 0xBEEF


class FakeNvml:
    """A GPU that tells its name, clocks and power, and neither its temperature nor what throttles it.

    Args:
        code: what every call after the initialisation returns, in place of its own answer.
        broken: the initialisation fails.
    """

    def __init__(self, code: int = 0, *, broken: bool = False) -> None:
        self.code, self.broken, self.open = code, broken, 0
        self.name, self.users = b"NVIDIA H200", 2

    def nvmlInit_v2(self) -> int:
        self.open += not self.broken
        return 999 if self.broken else 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, length: ctypes.c_uint) -> int:
        return self._write_text(text, length, b"580.65.06")

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return self._write(count, 1)

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        return self._write(handle, HANDLE) if index.value == 0 else NOT_FOUND

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return self._write(handle, HANDLE) if uuid == UUID.encode() else NOT_FOUND

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, text: Any, length: ctypes.c_uint) -> int:
        return self._write_text(text, length, self.name)

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, length: ctypes.c_uint) -> int:
        return self._write_text(text, length, UUID.encode())

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        return self._write(major, 9) or self._write(minor, 0)

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, kind: int, clock_mhz: Any) -> int:
        return self._write(clock_mhz, {1: 1980, 2: 3201}[kind])

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, milliwatts: Any) -> int:
        return self._write(milliwatts, 512_300)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: ctypes.c_void_p, milliwatts: Any) -> int:
        return self._write(milliwatts, 699_600)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, millijoules: Any) -> int:
        return self._write(millijoules, 1 << 40)

    def nvmlDeviceGetTemperature(self, handle: ctypes.c_void_p, sensor: int, degrees: Any) -> int:
        return NOT_SUPPORTED

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: ctypes.c_void_p, count: Any, infos: Any) -> int:
        """Fill an array; where it is too small, ask for a larger one than needed, as the driver does."""
        if infos is None or count._obj.value < self.users:
            return self._write(count, 2 * self.users) or INSUFFICIENT_SIZE
        assert ctypes.sizeof(infos) == 24 * count._obj.value
        return self._write(count, self.users)

    def _write(self, pointer: Any, value: int) -> int:
        if self.open <= 0:
            return UNINITIALIZED
        pointer._obj.value = value
        return self.code

    def _write_text(self, text: Any, length: ctypes.c_uint, value: bytes) -> int:
        assert len(value) < length.value == ctypes.sizeof(text)
        text.value = value
        return self.code if self.open > 0 else UNINITIALIZED
