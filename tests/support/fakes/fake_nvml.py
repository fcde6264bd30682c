"""NVML with one GPU, for tests: functions in place of pynvml's."""

from typing import Any

import pynvml
import pytest

UUID = "GPU-11111111-2222-3333-4444-555555555555"
HANDLE = object()


class FakeNvml:
    """A GPU that tells its name, clocks and power, and neither its temperature nor what throttles it.

    Args:
        code: the error of every call between the initialisation and the shutdown, in place of its own answer.
        broken: the initialisation fails.
    """

    def __init__(self, code: int = pynvml.NVML_SUCCESS, *, broken: bool = False) -> None:
        self.code, self.broken, self.open = code, broken, 0
        self.name, self.users = "NVIDIA H200", 2

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the functions of this GPU in place of pynvml's, each of which must be there."""
        for name in dir(self):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, getattr(self, name))

    def nvmlInit(self) -> None:
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._answer("580.65.06")

    def nvmlDeviceGetCount(self) -> Any:
        return self._answer(1)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._answer(HANDLE) if index == 0 else self._fail(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return self._answer(HANDLE) if uuid == UUID else self._fail(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetName(self, handle: object) -> Any:
        return self._of_gpu(handle, self.name)

    def nvmlDeviceGetUUID(self, handle: object) -> Any:
        return self._of_gpu(handle, UUID)

    def nvmlDeviceGetCudaComputeCapability(self, handle: object) -> Any:
        return self._of_gpu(handle, (9, 0))

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> Any:
        return self._of_gpu(handle, {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[kind])

    def nvmlDeviceGetPowerUsage(self, handle: object) -> Any:
        return self._of_gpu(handle, 512_300)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object) -> Any:
        return self._of_gpu(handle, 699_600)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> Any:
        return self._of_gpu(handle, 1 << 40)

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> Any:
        return self._fail(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> Any:
        return self._fail(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: object) -> Any:
        return self._of_gpu(handle, [object()] * self.users)

    def _of_gpu(self, handle: object, value: object) -> Any:
        assert handle is HANDLE
        return self._answer(value)

    def _answer(self, value: object) -> Any:
        code = self.code if self.open > 0 else pynvml.NVML_ERROR_UNINITIALIZED
        return value if code == pynvml.NVML_SUCCESS else self._fail(code)

    def _fail(self, code: int) -> Any:
        raise pynvml.NVMLError(code)
