"""NVML may be absent, or answer only in part; a GPU is measured by one run at a time."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from blocktune.db.records.records import Telemetry
from blocktune.tuner.measure import telemetry
from blocktune.tuner.measure.telemetry import GpuMonitor, canonical_uuid, disturbances, gpu_lock, nvml_devices

pytestmark = pytest.mark.triton_free

UUID = "GPU-11111111-2222-3333-4444-555555555555"


def refuse(*arguments: Any) -> None:
    raise pynvml.NVMLError_NotSupported


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One GPU that tells its name, clocks and power, and not its temperature or throttling."""
    answers: dict[str, Callable[..., Any]] = {
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: "handle",
        "nvmlDeviceGetHandleByUUID": lambda uuid: "handle" if uuid == UUID else refuse(),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: UUID,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, 0],
        "nvmlDeviceGetClockInfo": lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[kind],
        "nvmlDeviceGetPowerUsage": lambda handle: 512_300,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: ["worker", "somebody"],
        "nvmlDeviceGetTemperature": refuse,
        "nvmlDeviceGetCurrentClocksThrottleReasons": refuse,
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
    }
    constants = {name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_")}
    fake = SimpleNamespace(**constants, **answers)
    monkeypatch.setattr(telemetry, "_nvml", lambda: fake)
    return fake


def test_what_nvml_does_not_answer_is_unknown(nvml: SimpleNamespace) -> None:
    monitor = GpuMonitor(UUID, own_processes=1)
    assert monitor.sample() == Telemetry(sm_clock_mhz=1980, memory_clock_mhz=3201, power_w=512.3, other_processes=1)
    assert monitor.power_limit_w == 700
    assert telemetry.driver_version() == "580.159.04"
    nvml.nvmlDeviceGetComputeRunningProcesses = refuse
    assert monitor.sample().other_processes is None


def test_a_gpu_is_found_by_its_uuid_alone(nvml: SimpleNamespace) -> None:
    assert canonical_uuid(UUID.removeprefix("GPU-")) == UUID
    assert GpuMonitor(UUID.removeprefix("GPU-")).sample().sm_clock_mhz == 1980
    assert GpuMonitor("GPU-00000000").sample() == Telemetry()
    (device,) = nvml_devices()
    assert (device.name, device.limits.cc, device.uuid, device.source) == ("NVIDIA H200", (9, 0), UUID, "nvml")
    assert device.num_sms == 132  # of the catalogue


def test_without_nvml_everything_is_unknown_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry._nvml.cache_clear()
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert GpuMonitor(UUID).sample() == Telemetry()
    assert GpuMonitor(UUID).power_limit_w == 0
    assert nvml_devices() == ()
    assert telemetry.driver_version() == ""
    assert len(caplog.records) == 1
    telemetry._nvml.cache_clear()


def test_disturbances_are_told() -> None:
    calm, shared = Telemetry(throttle_reasons=0x04), Telemetry(other_processes=2)
    hot = Telemetry(throttle_reasons=0x44)
    assert disturbances([calm, Telemetry()]) == ()
    notes = disturbances([calm, shared, hot, hot])
    assert "during 1 of 4" in notes[0]
    assert "during 2 of 4" in notes[1]


def test_one_run_measures_on_a_gpu_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = (
        "import sys; from blocktune.tuner.measure.telemetry import gpu_lock\n"
        "with gpu_lock(sys.argv[1], lambda message: None): print('held', flush=True); sys.stdin.read()"
    )
    messages: list[str] = []

    def end_the_other(message: str) -> None:
        messages.append(message)
        other.kill()  # the lock of a process ends with it, however it ends

    command = [sys.executable, "-P", "-c", code, UUID]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with gpu_lock("GPU-another", messages.append):
            assert messages == []
        with gpu_lock(UUID, end_the_other):
            assert len(messages) == 1
            assert UUID in messages[0]
    with gpu_lock(None, messages.append), gpu_lock(None, messages.append):
        assert len(messages) == 1


def test_a_gpu_that_the_catalogue_does_not_hold_is_left_out(
    nvml: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.nvmlDeviceGetName = lambda handle: "NVIDIA H2000"
    assert nvml_devices() == ()
    assert "NVIDIA H2000" in caplog.text
