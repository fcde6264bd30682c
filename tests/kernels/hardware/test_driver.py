"""Reading the CUDA driver, through a stand-in for libcuda and, where there is a GPU, through the real one."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from blocktune.kernels.hardware import driver
from blocktune.kernels.hardware.driver import LiveDevice, read_driver, read_torch
from tests.support.fakes.fake_driver import H200_UUID, FakeDriver, FakeGpu

pytestmark = pytest.mark.triton_free


def test_one_gpu() -> None:
    report = read_driver(FakeDriver(gpus=[FakeGpu()]))
    assert (report.cuda_version, report.problem, report.source) == ((12, 8), "", "driver")
    assert report.devices == (
        LiveDevice(
            index=0,
            name="NVIDIA H200",
            cc=(9, 0),
            num_sms=132,
            uuid=f"GPU-{H200_UUID}",
            memory_bytes=150_754_820_096,
            max_threads_per_sm=2048,
            max_blocks_per_sm=32,
            registers_per_sm=65536,
            registers_per_block=65536,
            shared_per_sm_bytes=233_472,
            shared_per_block_optin_bytes=232_448,
            shared_reserved_bytes=1024,
            l2_bytes=62_914_560,
            clock_khz=1_980_000,
            memory_clock_khz=3_201_000,
            memory_bus_bits=6144,
        ),
    )


def test_bandwidth_from_clock_and_width() -> None:
    device = read_driver(FakeDriver(gpus=[FakeGpu()])).devices[0]
    assert device.memory_gbs == pytest.approx(4916.7, abs=0.1)


@pytest.mark.parametrize("missing", [36, 37])
def test_a_zero_clock_or_width_is_unknown_bandwidth(missing: int) -> None:
    gpu = FakeGpu()
    gpu.attributes[missing] = 0  # as Jetson boards report
    assert read_driver(FakeDriver(gpus=[gpu])).devices[0].memory_gbs is None


def test_several_gpus_keep_their_order() -> None:
    report = read_driver(FakeDriver(gpus=[FakeGpu(name="a"), FakeGpu(name="b")]))
    assert [(device.index, device.name) for device in report.devices] == [(0, "a"), (1, "b")]


def test_an_attribute_that_the_driver_does_not_know_is_none() -> None:
    gpu = FakeGpu()
    del gpu.attributes[111]
    assert read_driver(FakeDriver(gpus=[gpu])).devices[0].shared_reserved_bytes is None


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        ({"cuInit": 100}, "sees no GPU"),
        ({"cuInit": 34}, "stub"),
        ({"cuInit": 803}, "different versions"),
        ({"cuInit": 999}, r"does not work\. \(cuInit failed with CUDA error 999\)"),
        ({"cuDeviceGetName": 3}, "forked child"),
    ],
)
def test_every_failure_is_reported_with_its_meaning(failing: dict[str, int], words: str) -> None:
    report = read_driver(FakeDriver(gpus=[FakeGpu()], failing=failing))
    assert report.devices == ()
    assert report.cuda_version == (12, 8)
    assert re.search(words, report.problem)


def test_no_gpu_behind_a_working_driver() -> None:
    report = read_driver(FakeDriver())
    assert report.devices == ()
    assert "CUDA_VISIBLE_DEVICES" in report.problem


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_library", lambda: None)
    report = read_driver()
    assert (report.devices, report.cuda_version) == ((), None)
    assert "No NVIDIA driver is installed" in report.problem


def test_torch_is_asked_only_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert read_torch().devices == ()
    assert "torch" not in sys.modules


def test_torch_properties_of_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=150, multi_processor_count=132, regs_per_multiprocessor=65536
    )
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: properties
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.8")))
    (device,) = read_torch().devices
    assert (device.name, device.cc, device.num_sms, device.registers_per_sm) == ("NVIDIA H200", (9, 0), 132, 65536)
    assert device.uuid is None
    assert device.shared_per_sm_bytes is None


@pytest.mark.gpu
def test_the_real_driver() -> None:
    report = read_driver()
    assert report.problem == ""
    for device in report.devices:
        assert all(getattr(device, name) is not None for name in LiveDevice.__dataclass_fields__)
        assert device.uuid is not None
        assert device.uuid.startswith("GPU-")
        assert len(device.uuid) == 40


@pytest.mark.gpu
def test_hidden_gpus_are_hidden() -> None:
    code = "from blocktune.kernels.hardware.driver import read_driver; print(len(read_driver().devices))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0"
