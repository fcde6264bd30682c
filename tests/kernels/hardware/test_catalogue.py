"""The catalogue's rows: consistent among themselves, with the table of limits, and found by exact names only."""

import pytest

from blocktune.kernels.hardware.catalogue import (
    CatalogueEntry,
    _lookup_key,
    catalogue,
    entry_by_driver_name,
    find_entry,
    normalise_name,
)
from blocktune.kernels.hardware.limits import KIB, limits_for
from blocktune.kernels.values.errors import UnknownDeviceError

pytestmark = pytest.mark.triton_free

ROWS = [pytest.param(entry, id=entry.id) for entry in catalogue()]
# The advertised tensor peak of these is at a lower clock than the boost (1830, 1620 and about 1856 MHz).
PEAK_CLOCK_MHZ = {"h100_sxm5": 1830, "h200_sxm": 1830, "gh200_480": 1830, "h100_pcie": 1620, "b200": 1856, "b300": 1856}


@pytest.mark.parametrize("entry", ROWS)
def test_tensor_rate_follows_from_sms_clock_and_rate(entry: CatalogueEntry) -> None:
    if entry.tensor_tflops is None or entry.tensor_flops_per_clock is None:
        assert entry.id == "gb10"  # unknown, and not guessed
        return
    clock_hz = PEAK_CLOCK_MHZ.get(entry.id, entry.boost_mhz) * 1e6
    computed = entry.num_sms * clock_hz * entry.tensor_flops_per_clock / 1e12
    assert computed == pytest.approx(entry.tensor_tflops, rel=0.0125)


@pytest.mark.parametrize("entry", ROWS)
def test_row_agrees_with_its_compute_capability(entry: CatalogueEntry) -> None:
    limits = limits_for(entry.cc)
    assert entry.shared_per_sm_kib * KIB == limits.shared_per_sm_bytes
    assert entry.confidence in {"D", "W", "S", "M"}
    assert len(entry.source) > 10
    if entry.fp8_tflops is not None:
        assert entry.cc >= (8, 9)
        assert entry.fp8_tflops == pytest.approx(2 * entry.tensor_tflops, rel=0.013)


def test_every_name_means_one_row() -> None:
    assert len(catalogue()) == 34
    owners: dict[str, str] = {}
    for entry in catalogue():
        for name in (entry.id, entry.name, *entry.aliases):
            assert owners.setdefault(_lookup_key(name), entry.id) == entry.id


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("h200", "h200_sxm"),
        ("NVIDIA H200", "h200_sxm"),
        ("H100", "h100_sxm5"),
        ("h100-pcie", "h100_pcie"),
        ("a100", "a100_sxm4_80"),
        ("rtx2070", "rtx2070"),
        ("RTX 2070", "rtx2070"),
        ("nvidia geforce rtx 2070", "rtx2070"),
    ],
)
def test_names_that_are_found(name: str, row: str) -> None:
    assert find_entry(name).id == row


@pytest.mark.parametrize(
    "name", ["GH20", "A100 XYZ", "RTX 4070 Ti", "H200 NVL", "L40", "NVIDIA H200 MIG 1g.18gb", "", "rtx"]
)
def test_no_name_matches_by_substring(name: str) -> None:
    with pytest.raises(UnknownDeviceError):
        find_entry(name)


def test_a_number_of_four_digits_is_enough_where_one_row_ends_with_it() -> None:
    assert find_entry("4090").id == "rtx4090"
    for name in ("090", "a100 4090", "2024"):
        with pytest.raises(UnknownDeviceError):
            find_entry(name)


def test_a_model_of_several_rows_names_them_first() -> None:
    with pytest.raises(UnknownDeviceError, match="The nearest names are a100_sxm4_40, a100_sxm4_80, "):
        find_entry("NVIDIA A100")


def test_the_error_lists_near_names_and_the_file() -> None:
    with pytest.raises(UnknownDeviceError, match=r"'h20'.*h200_sxm.*kernels/hardware/gpus\.csv"):
        find_entry("h20")
    with pytest.raises(UnknownDeviceError, match=r"rtxpro6000_ws, rtxpro6000_srv"):
        find_entry("rtx pro 6000")
    with pytest.raises(UnknownDeviceError, match="No name there is close"):
        find_entry("§§§")


def test_a_driver_name_is_no_alias() -> None:
    found = entry_by_driver_name("NVIDIA H200")
    assert found is not None
    assert found.id == "h200_sxm"
    assert entry_by_driver_name("H200") is None
    assert entry_by_driver_name("NVIDIA GeForce RTX 4070 Ti") is None


def test_normalised() -> None:
    assert normalise_name("  NVIDIA A100-SXM4-80GB ") == "nvidia a100 sxm4 80gb"


def test_json_is_plain() -> None:
    data = find_entry("h200").to_json()
    assert (data["id"], data["cc"], data["num_sms"], data["aliases"]) == ("h200_sxm", "9.0", 132, ["h200"])
