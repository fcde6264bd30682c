"""The table of compute capabilities and the ways to name one."""

import pytest

from blocktune.kernels.hardware.limits import KIB, known_ccs, limits_for, parse_cc
from blocktune.kernels.values.errors import UnknownDeviceError, UsageError

pytestmark = pytest.mark.triton_free

# cc: warps/SM, blocks/SM, shared KiB/SM, opt-in KiB, reserve, unit; from the CUDA programming guide and the header.
TABLE = {
    "7.0": (64, 32, 96, 96, 0, 256),
    "7.2": (64, 32, 96, 96, 0, 256),
    "7.5": (32, 16, 64, 64, 0, 256),
    "8.0": (64, 32, 164, 163, 1024, 128),
    "8.6": (48, 16, 100, 99, 1024, 128),
    "8.7": (48, 16, 164, 163, 1024, 128),
    "8.8": (48, 16, 100, 99, 1024, 128),
    "8.9": (48, 24, 100, 99, 1024, 128),
    "9.0": (64, 32, 228, 227, 1024, 128),
    "10.0": (64, 32, 228, 227, 1024, 128),
    "10.3": (64, 32, 228, 227, 1024, 128),
    "11.0": (48, 24, 228, 227, 1024, 128),
    "12.0": (48, 24, 100, 99, 1024, 128),
    "12.1": (48, 24, 100, 99, 1024, 128),
}


@pytest.mark.parametrize("name", TABLE)
def test_row(name: str) -> None:
    row = limits_for(parse_cc(name))
    assert row.name == name
    assert TABLE[name] == (
        row.max_warps_per_sm,
        row.max_blocks_per_sm,
        row.shared_per_sm_bytes // KIB,
        row.shared_per_block_optin_bytes // KIB,
        row.shared_reserved_bytes,
        row.shared_unit_bytes,
    )
    assert (row.registers_per_sm, row.registers_per_block, row.sub_partitions) == (65536, 65536, 4)


def test_every_row_is_tested_and_consistent() -> None:
    assert [f"{major}.{minor}" for major, minor in known_ccs()] == list(TABLE)
    for row in map(limits_for, known_ccs()):
        assert row.carveouts_kib[-1] * KIB == row.shared_per_sm_bytes
        assert row.shared_per_block_optin_bytes + row.shared_reserved_bytes == row.shared_per_sm_bytes
        assert list(row.carveouts_kib) == sorted(set(row.carveouts_kib))


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("7.5", "none"),
        ("8.0", "mma"),
        ("8.9", "mma"),
        ("9.0", "wgmma"),
        ("10.3", "tcgen05"),
        ("11.0", "tcgen05"),
        ("12.0", "mma"),
        ("12.1", "mma"),
    ],
)
def test_matrix_unit(name: str, unit: str) -> None:
    row = limits_for(parse_cc(name))
    assert row.mma == unit
    assert (row.tensor_memory_columns > 0) == (unit == "tcgen05")


def test_thor_has_two_numbers() -> None:
    assert limits_for((10, 1)) is limits_for((11, 0))


@pytest.mark.parametrize("cc", [(6, 1), (9, 1), (13, 0), (0, 0)])
def test_unknown_cc_is_an_error_that_names_the_known_ones(cc: tuple[int, int]) -> None:
    with pytest.raises(
        UnknownDeviceError, match=rf"12\.0, 12\.1, but got {cc[0]}\.{cc[1]}\. .*kernels/hardware/limits\.py"
    ):
        limits_for(cc)


@pytest.mark.parametrize(
    ("text", "cc"),
    [
        ("9.0", (9, 0)),
        (" 8.6 ", (8, 6)),
        ("90", (9, 0)),
        ("9", (9, 0)),
        ("sm_90a", (9, 0)),
        ("SM120", (12, 0)),
        ("12.1", (12, 1)),
    ],
)
def test_parse_cc(text: str, cc: tuple[int, int]) -> None:
    assert parse_cc(text) == cc


@pytest.mark.parametrize("text", ["", "9.", "x", "9.0.1", "-9.0", "compute 90"])
def test_parse_cc_refuses(text: str) -> None:
    with pytest.raises(UsageError, match=r"written as 9\.0, 90 or sm_90"):
        parse_cc(text)


def test_arch_number() -> None:
    assert [limits_for(cc).sm_arch for cc in ((7, 5), (9, 0), (12, 1))] == [75, 90, 121]
