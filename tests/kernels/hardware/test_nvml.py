"""What is asked of NVML, and that its absence and its refusals are no errors."""

import ctypes
from typing import Any

import pytest

from blocktune.kernels.hardware import nvml
from blocktune.kernels.hardware.nvml import driver_version, power_limit_w


class FakeNvml:
    """libnvidia-ml as the code calls it; every call after the initialisation answers `code`."""

    def __init__(self, code: int = 0, *, broken: bool = False) -> None:
        self.code, self.broken, self.open = code, broken, 0

    def nvmlInit_v2(self) -> int:
        self.open += not self.broken
        return 999 if self.broken else 0

    def nvmlSystemGetDriverVersion(self, text: Any, length: ctypes.c_uint) -> int:
        assert length.value == ctypes.sizeof(text)
        text.value = b"580.65.06"
        return self.code

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        assert uuid == b"GPU-1"
        return self.code

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 699_600
        return self.code

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0


@pytest.mark.parametrize(
    ("library", "version", "watts"),
    [(FakeNvml(), "580.65.06", 700), (FakeNvml(3), "", 0), (FakeNvml(broken=True), "", 0)],
    ids=["works", "refuses", "broken"],
)
def test_the_library_is_asked_and_let_go(
    library: FakeNvml, version: str, watts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: library)
    assert driver_version.__wrapped__() == version
    assert power_limit_w.__wrapped__("GPU-1") == watts
    assert power_limit_w.__wrapped__(None) == 0
    assert library.open == 0


def test_without_the_library_all_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnosuch.so.1")
    assert (driver_version.__wrapped__(), power_limit_w.__wrapped__("GPU-1")) == ("", 0)


@pytest.mark.gpu
def test_it_tells_what_the_tuner_records() -> None:
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.measure.telemetry import GpuMonitor
    from blocktune.tuner.measure.telemetry import driver_version as recorded

    uuid = current_device().uuid
    assert driver_version() == recorded() != ""
    assert power_limit_w(uuid) == GpuMonitor(uuid).power_limit_w > 0
