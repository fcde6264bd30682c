"""What is asked of NVML, and that its absence and its refusals are no errors."""

import re
import subprocess
import sys

import pynvml
import pytest

from blocktune.kernels.hardware.nvml import Nvml, NvmlGpu, driver_version, power_limit_w
from tests.support.fakes.fake_nvml import UUID, FakeNvml

pytestmark = pytest.mark.triton_free


@pytest.mark.parametrize(
    ("library", "version", "watts"),
    [
        (FakeNvml(), "580.65.06", 700),
        (FakeNvml(pynvml.NVML_ERROR_NOT_SUPPORTED), "", 0),
        (FakeNvml(broken=True), "", 0),
    ],
    ids=["works", "refuses", "broken"],
)
def test_the_library_is_asked_and_let_go(
    library: FakeNvml, version: str, watts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.install(monkeypatch)
    assert driver_version.__wrapped__() == version
    assert power_limit_w.__wrapped__(UUID) == watts
    assert power_limit_w.__wrapped__("GPU-of-another-machine") == 0
    assert power_limit_w.__wrapped__(None) == 0
    assert library.open == 0


def test_a_gpu_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    library.install(monkeypatch)
    opened = Nvml.open()
    assert opened is not None
    (gpu,) = opened.gpus()
    assert (gpu.name, gpu.uuid, gpu.compute_capability) == ("NVIDIA H200", UUID, (9, 0))
    assert (gpu.sm_clock_mhz, gpu.memory_clock_mhz) == (1980, 3201)
    assert (gpu.power_w, gpu.power_limit_w, gpu.energy_j) == (512.3, 699.6, (1 << 40) / 1000)
    assert gpu.num_processes == 2
    library.users = 0
    assert gpu.num_processes == 0
    assert gpu.temperature_c is None  # not supported
    assert gpu.throttle_reasons is None  # this driver has no such function
    assert opened.gpu(UUID.removeprefix("GPU-")) is not None  # torch's spelling
    library.code = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert (gpu.name, gpu.compute_capability, gpu.sm_clock_mhz, gpu.num_processes) == (None, None, None, None)
    assert opened.gpus() == []


def test_what_a_driver_lacks_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", object())  # pynvml's own functions find none of the driver's
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    gpu = NvmlGpu(Nvml(pynvml), handle=None)
    properties = [name for name, value in vars(NvmlGpu).items() if isinstance(value, property)]
    assert len(properties) == 11
    assert [getattr(gpu, name) for name in properties] == [None] * 11


def test_without_pynvml_all_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml.open() is None
    assert (driver_version.__wrapped__(), power_limit_w.__wrapped__(UUID)) == ("", 0)


@pytest.mark.gpu
def test_it_tells_what_nvidia_smi_shows() -> None:
    from blocktune.kernels.hardware.device import current_device

    device = current_device()
    assert device.uuid is not None
    opened = Nvml.open()
    assert opened is not None
    gpu = opened.gpu(device.uuid)
    assert gpu is not None
    query = "driver_version,name,uuid,power.limit,clocks.max.sm,clocks.max.mem,temperature.gpu,compute_cap"
    command = ["nvidia-smi", f"--id={device.uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    shown = re.split(", *", subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    driver, name, uuid, limit_w, sm_mhz, memory_mhz, temperature_c, capability = shown
    assert (driver_version(), gpu.name, gpu.uuid) == (driver, name, uuid)
    assert gpu.compute_capability == tuple(map(int, capability.split("."))) == device.limits.cc
    assert power_limit_w(uuid) == round(float(limit_w))
    ranges = {
        "sm_clock_mhz": (1, int(sm_mhz)),
        "memory_clock_mhz": (1, int(memory_mhz)),
        "temperature_c": (int(temperature_c) - 5, int(temperature_c) + 5),
        "power_w": (10, 2 * float(limit_w)),
        "energy_j": (1, float("inf")),
        "throttle_reasons": (0, 2**63),
        "num_processes": (0, 1000),
    }
    told = {name: getattr(gpu, name) for name in ranges}
    assert {name for name, (low, high) in ranges.items() if not low <= (told[name] or 0) <= high} == set(), told
    assert None not in told.values(), told


@pytest.mark.gpu
def test_it_counts_the_processes_on_a_gpu() -> None:
    import torch

    from blocktune.kernels.hardware.device import current_device

    uuid = current_device().uuid
    opened = Nvml.open()
    assert uuid is not None
    assert opened is not None
    gpu = opened.gpu(uuid)
    assert gpu is not None
    torch.ones(1, device="cuda")
    command = ["nvidia-smi", f"--id={uuid}", "--query-compute-apps=pid", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert gpu.num_processes == len(shown) >= 1
