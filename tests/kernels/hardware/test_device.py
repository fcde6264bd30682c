"""Device specs from a driver, from the catalogue and from JSON."""

import json
import warnings
from dataclasses import replace

import pytest

from blocktune.kernels.hardware import device
from blocktune.kernels.hardware.catalogue import catalogue
from blocktune.kernels.hardware.device import (
    DeviceFactsWarning,
    DeviceSpec,
    current_device,
    device_named,
    limits_for,
    present_devices,
)
from blocktune.kernels.hardware.driver import DriverReport, read_driver
from blocktune.kernels.values.errors import NoDeviceError, UnknownDeviceError, UsageError
from tests.support.fakes.fake_driver import H200_UUID, FakeDriver, FakeGpu

pytestmark = pytest.mark.triton_free


def use(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> None:
    """Lets these GPUs be the present ones."""
    report = read_driver(FakeDriver(gpus=list(gpus)))
    monkeypatch.setattr(device, "read_driver", lambda: report)
    monkeypatch.setattr(device, "read_torch", DriverReport)


def test_named_device_has_the_catalogue_facts() -> None:
    h200 = device_named("h200")
    assert (h200.name, h200.limits, h200.num_sms, h200.source) == ("NVIDIA H200", limits_for((9, 0)), 132, "catalogue")
    assert (h200.clock_mhz, h200.memory_gbs, h200.tensor_flops_per_clock, h200.tensor_tflops) == (
        1980,
        4800,
        4096,
        989.4,
    )
    assert (h200.l2_bytes, h200.uuid) == (60 << 20, None)


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.id) for entry in catalogue()])
def test_every_row_makes_a_spec(entry: device.CatalogueEntry) -> None:
    for name in (entry.id, entry.name, *entry.aliases):
        spec = device_named(name)
        assert (spec.name, spec.limits.cc, spec.num_sms) == (entry.name, entry.cc, entry.num_sms)
        assert DeviceSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_the_rtx_2070() -> None:
    rtx2070 = device_named("rtx2070")
    assert (rtx2070.limits.cc, rtx2070.num_sms, rtx2070.limits.shared_per_sm_bytes) == ((7, 5), 36, 64 * 1024)


def test_unknown_tensor_rate_stays_unknown() -> None:
    gb10 = device_named("gb10")
    assert (gb10.tensor_flops_per_clock, gb10.tensor_tflops) == (None, None)


def test_unknown_name() -> None:
    with pytest.raises(UnknownDeviceError, match=r"No such device: 'rtx9090'\. The nearest names are .*gpus\.csv"):
        device_named("rtx9090")


def test_key() -> None:
    assert device_named("h200").key == "nvidia h200|9.0|132"


def test_present_device_takes_limits_from_the_driver_and_rates_from_the_catalogue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, FakeGpu())
    (h200,) = present_devices()
    assert h200.uuid == f"GPU-{H200_UUID}"
    assert (h200.source, h200.memory_bytes) == ("driver", 150_754_820_096)
    assert replace(h200, source="catalogue", uuid=None, memory_bytes=None) == replace(
        device_named("h200"), memory_bytes=None
    )
    assert h200.key == device_named("h200").key


@pytest.mark.parametrize(
    ("attribute", "told", "field", "value"),
    [
        (39, 1536, "max_warps_per_sm", 48),
        (106, 24, "max_blocks_per_sm", 24),
        (82, 32768, "registers_per_sm", 32768),
        (12, 32768, "registers_per_block", 32768),
        (81, 200_000, "shared_per_sm_bytes", 200_000),
        (97, 100_000, "shared_per_block_optin_bytes", 100_000),
        (111, 2048, "shared_reserved_bytes", 2048),
    ],
)
def test_a_limit_that_differs_warns_and_wins(
    monkeypatch: pytest.MonkeyPatch, attribute: int, told: int, field: str, value: int
) -> None:
    gpu = FakeGpu()
    gpu.attributes[attribute] = told
    use(monkeypatch, gpu)
    table = getattr(limits_for((9, 0)), field)
    with pytest.warns(DeviceFactsWarning, match=rf"{field} = {value}, but kernels/hardware/limits\.py says {table}"):
        (spec,) = present_devices()
    assert getattr(spec.limits, field) == value
    assert spec.to_json()["limits"] == {field: value}
    assert DeviceSpec.from_json(spec.to_json()) == spec


def test_another_sm_count_than_the_catalogue_drops_the_device_wide_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.attributes[16] = 100
    use(monkeypatch, gpu)
    with pytest.warns(DeviceFactsWarning, match=r"num_sms = 100, but kernels/hardware/gpus\.csv says 132"):
        (spec,) = present_devices()
    assert (spec.num_sms, spec.tensor_tflops, spec.tensor_flops_per_clock) == (100, None, 4096)
    assert spec.memory_gbs == pytest.approx(4916.7, abs=0.1)


def test_a_gpu_that_the_catalogue_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeGpu(name="NVIDIA H200 NVL"))
    (spec,) = present_devices()
    assert (spec.name, spec.limits, spec.num_sms) == ("NVIDIA H200 NVL", limits_for((9, 0)), 132)
    assert (spec.clock_mhz, spec.l2_bytes) == (1980, 62_914_560)
    assert spec.memory_gbs == pytest.approx(4916.7, abs=0.1)
    assert (spec.tensor_flops_per_clock, spec.tensor_tflops) == (None, None)


def test_a_gpu_of_an_unknown_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeGpu(name="Tesla P100-PCIE-16GB")
    old.attributes |= {75: 6, 76: 0}
    use(monkeypatch, old, FakeGpu())
    with pytest.warns(DeviceFactsWarning, match=r"P100-PCIE-16GB is left out.*but got 6\.0"):
        assert [spec.name for spec in present_devices()] == ["NVIDIA H200"]
    with pytest.raises(UnknownDeviceError, match=r"but got 6\.0"):
        current_device(0)
    assert current_device(1).name == "NVIDIA H200"


def test_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeGpu(), FakeGpu(name="NVIDIA H200 NVL"))
    assert current_device().name == "NVIDIA H200"
    assert current_device(1).name == "NVIDIA H200 NVL"
    for index in (2, -1):
        with pytest.raises(NoDeviceError, match=f"must be 0 to 1 here, but got {index}"):
            current_device(index)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    assert present_devices() == ()
    with pytest.raises(NoDeviceError, match=r"required here\. The NVIDIA driver sees no GPU.*`best_config"):
        current_device()


def test_torch_serves_where_the_driver_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    by_driver = read_driver(FakeDriver(gpus=[FakeGpu()]))
    monkeypatch.setattr(device, "read_driver", lambda: DriverReport(problem="none"))
    monkeypatch.setattr(device, "read_torch", lambda: replace(by_driver, source="torch"))
    assert current_device().source == "torch"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_sms": 0}, "1 <= num_sms <= 4096"),
        ({"num_sms": True}, "1 <= num_sms <= 4096"),
        ({"name": ""}, "1 to 256 characters"),
        ({"clock_mhz": -1}, "`clock_mhz` must be positive"),
        ({"clock_mhz": 1.5}, "`clock_mhz` must be positive"),
        ({"memory_gbs": float("nan")}, "`memory_gbs` must be positive"),
        ({"tensor_tflops": "989"}, "`tensor_tflops` must be positive"),
        ({"source": "hearsay"}, "source of a device must be one of"),
        ({"uuid": 7}, "UUID"),
        ({"cc": "6.0"}, r"but got 6\.0"),
        ({"cc": None}, "compute capability `cc`"),
        ({"colour": "green"}, "colour"),
        ({"limits": {"carveouts_kib": 7}}, "may replace"),
        ({"limits": {"max_warps_per_sm": "64"}}, "may replace"),
        ({"limits": []}, "`limits` must be an object"),
    ],
)
def test_from_json_refuses(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DeviceSpec.from_json(device_named("h200").to_json() | change)


def test_from_json_refuses_a_missing_field() -> None:
    data = device_named("h200").to_json()
    del data["num_sms"]
    with pytest.raises(UsageError, match="num_sms"):
        DeviceSpec.from_json(data)


@pytest.mark.gpu
def test_the_present_gpu_agrees_with_the_tables() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in present_devices():
            assert spec.limits == limits_for(spec.limits.cc)
            assert spec.source == "driver"
    assert current_device(0) == present_devices()[0]
