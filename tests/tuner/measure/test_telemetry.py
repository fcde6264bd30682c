"""NVML may be absent, or answer only in part; a GPU is measured by one run at a time."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from blocktune.db.records.records import Telemetry
from blocktune.kernels.hardware.nvml import canonical_uuid
from blocktune.tuner.measure import lock_file, telemetry
from blocktune.tuner.measure.telemetry import GpuMonitor, disturbances, gpu_lock, nvml_devices
from tests.support.fakes.fake_nvml import UUID, FakeNvml

pytestmark = pytest.mark.triton_free


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """One GPU that tells its name, clocks and power, and not its temperature or throttling."""
    fake = FakeNvml()
    fake.install(monkeypatch)
    telemetry._nvml.cache_clear()
    telemetry._warn_without_nvml.cache_clear()
    yield fake
    telemetry._nvml.cache_clear()
    telemetry._warn_without_nvml.cache_clear()


def test_what_nvml_does_not_answer_is_unknown(library: FakeNvml) -> None:
    monitor = GpuMonitor(UUID, own_processes=1)
    assert monitor.sample() == Telemetry(sm_clock_mhz=1980, memory_clock_mhz=3201, power_w=512.3, other_processes=1)
    assert monitor.power_limit_w == 700
    assert monitor.energy_j() == (1 << 40) / 1000
    library.code = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert monitor.sample() == Telemetry()
    assert (monitor.power_limit_w, monitor.energy_j()) == (0, None)


def test_a_gpu_is_found_by_its_uuid_alone(library: FakeNvml) -> None:
    assert canonical_uuid(UUID.removeprefix("GPU-")) == UUID
    assert GpuMonitor(UUID.removeprefix("GPU-")).sample().sm_clock_mhz == 1980
    assert GpuMonitor("GPU-00000000").sample() == Telemetry()
    (device,) = nvml_devices()
    assert (device.name, device.limits.cc, device.uuid, device.source) == ("NVIDIA H200", (9, 0), UUID, "nvml")
    assert device.num_sms == 132  # of the catalogue


def test_nvml_stays_open_between_samples(library: FakeNvml) -> None:
    monitor = GpuMonitor(UUID)
    for _ in range(3):
        monitor.sample()
    assert library.open == 1


def test_without_nvml_everything_is_unknown_and_that_is_said_once(
    library: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    library.broken = True
    assert GpuMonitor(UUID).sample() == Telemetry()
    assert GpuMonitor(UUID).power_limit_w == 0
    assert nvml_devices() == ()
    assert len(caplog.records) == 1


def test_disturbances_are_told() -> None:
    calm, shared = Telemetry(throttle_reasons=0x04), Telemetry(other_processes=2)
    hot = Telemetry(throttle_reasons=0x44)
    assert disturbances([calm, Telemetry()]) == ()
    notes = disturbances([calm, shared, hot, hot])
    assert "during 1 of 4" in notes[0]
    assert "during 2 of 4" in notes[1]


def test_one_run_measures_on_a_gpu_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lock_file, "QUIET_SECONDS", 0.1)
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
            assert f"process {other.pid} measures on the GPU {UUID}" in messages[0]
    with gpu_lock(None, messages.append), gpu_lock(None, messages.append):
        assert len(messages) == 1


def test_a_gpu_that_the_catalogue_does_not_hold_is_left_out(
    library: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    library.name = "NVIDIA H2000"
    assert nvml_devices() == ()
    assert "NVIDIA H2000" in caplog.text


def test_a_fifo_in_the_place_of_a_lock_does_not_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lock_file, "cache_folder", lambda: tmp_path)
    (tmp_path / "locks").mkdir()
    os.mkfifo(tmp_path / "locks" / "odd.lock")
    with lock_file.open_lock_file("odd") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_where_no_lock_can_be_made_measuring_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "cache_folder", lambda: Path("/dev/null/cache"))
    messages: list[str] = []
    with gpu_lock(UUID, messages.append):
        assert ["no file can be locked: NotADirectoryError" in message for message in messages] == [True]
