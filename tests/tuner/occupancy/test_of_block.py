"""`blocktune.occupancy`, and what a script and a notebook show of it."""

from xml.etree import ElementTree

import pytest

import blocktune
from blocktune import occupancy
from blocktune.kernels.hardware.device import device_named, limits_for
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import NoDeviceError, UnknownDeviceError, UsageError
from blocktune.tuner.occupancy.calculator import Limiter
from blocktune.tuner.occupancy.calculator import occupancy as calculated
from blocktune.tuner.occupancy.text import text_of_occupancy

pytestmark = pytest.mark.triton_free

BLOCK = {"num_warps": 4, "registers": 168, "shared_bytes": 115_712}


def test_a_block_is_counted_as_by_the_calculator() -> None:
    resources = KernelResources(
        num_warps=8, registers=64, shared_bytes=50_000, static_shared_bytes=1024, barriers=3, tensor_cores="none"
    )
    result = occupancy(
        num_warps=8,
        registers=64,
        shared_bytes=50_000,
        static_shared_bytes=1024,
        barriers=3,
        carveout_percent=60,
        cc="8.0",
    )
    assert result == calculated(resources, limits_for((8, 0)), carveout_percent=60)


def test_a_device_is_named_given_or_meant_by_its_compute_capability() -> None:
    results = [occupancy(**BLOCK, device="h200"), occupancy(**BLOCK, device=device_named("h200"))]
    results.append(occupancy(**BLOCK, cc="9.0"))
    assert [result.blocks_per_sm for result in results] == [2, 2, 2]
    assert results[0].limiters == (Limiter.SHARED_MEMORY,)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(UsageError, match=r"device='h200' and cc='9\.0'"):
        occupancy(**BLOCK, device="h200", cc="9.0")
    with pytest.raises(UnknownDeviceError):
        occupancy(**BLOCK, device="h2000")
    with pytest.raises(UsageError):
        occupancy(**BLOCK | {"num_warps": 0}, cc="9.0")


def test_without_a_device_the_gpu_here_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.kernels.hardware.device.current_device", lambda: device_named("a100_sxm4_80"))
    assert occupancy(**BLOCK).limits.name == "8.0"

    def no_device() -> None:
        raise NoDeviceError("A GPU is required here.")

    monkeypatch.setattr("blocktune.kernels.hardware.device.current_device", no_device)
    with pytest.raises(blocktune.NoDeviceError):
        occupancy(**BLOCK)


def test_print_says_it_in_words() -> None:
    result = occupancy(**BLOCK, cc="9.0")
    assert str(result) == text_of_occupancy(result)
    assert str(result).startswith("2 blocks/SM on compute capability 9.0")


def test_a_notebook_shows_every_limit_with_the_binding_one_in_bold() -> None:
    table = ElementTree.fromstring(occupancy(**BLOCK, cc="9.0")._repr_html_())[0]
    caption, *rows = table
    assert caption.text == "2 blocks/SM on compute capability 9.0: 8 of 64 warps"
    assert [(row[0].tag, row[0].text, row[1].text) for row in rows] == [
        ("td", "warps", "16"),
        ("td", "blocks", "32"),
        ("td", "registers", "3"),
        ("th", "shared memory", "2"),
        ("td", "barriers", "64"),
    ]
