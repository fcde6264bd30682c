"""Wavefronts of shared memory: known patterns, and the count of Triton's own compiler."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.occupancy.bank_conflicts import column_walk, padded, wavefronts, xor_swizzled

LANES = range(32)


def test_sixteen_rows_of_256_bytes_conflict_sixteen_ways() -> None:
    found = wavefronts(column_walk(16, 256))
    assert (found.degree, found.total, found.excess) == (16, 16, 15)
    assert found.efficiency == 0.0625


@pytest.mark.parametrize(
    ("stride_bytes", "access_bytes", "degree", "total"),
    [
        (4, 4, 1, 1),  # neighbours
        (128, 4, 32, 32),  # one bank for all
        (132, 4, 1, 1),  # padded by a word
        (8, 8, 1, 2),  # float2 rows: two phases
        (16, 16, 1, 4),  # float4 rows: four phases
        (128, 16, 8, 32),
        (272, 16, 1, 4),
        (256, 8, 16, 32),
        (0, 4, 1, 1),  # broadcast
        (0, 16, 1, 2),  # lanes that agree in pairs share a phase
        (2, 2, 1, 1),  # two lanes share every word
    ],
)
def test_wavefronts_of_a_stride(stride_bytes: int, access_bytes: int, degree: int, total: int) -> None:
    found = wavefronts([lane * stride_bytes for lane in LANES], access_bytes)
    assert (found.degree, found.total) == (degree, total)


@given(st.integers(1, 512), st.integers(0, 1 << 14))
def test_the_degree_of_a_word_stride_is_its_common_divisor_with_the_banks(stride_words: int, start_word: int) -> None:
    addresses = [4 * (start_word + lane * stride_words) for lane in LANES]
    assert wavefronts(addresses).degree == math.gcd(stride_words, 32)


@given(st.lists(st.integers(0, 4096), min_size=1, max_size=32), st.sampled_from([1, 2, 4, 8, 16]))
def test_wavefronts_are_those_of_a_count_bank_by_bank(numbers: list[int], access_bytes: int) -> None:
    addresses = [number * access_bytes for number in numbers]
    lanes = {16: 8, 8: 16}.get(access_bytes, 32)
    for phase, found in enumerate(wavefronts(addresses, access_bytes).phases):
        words_of: dict[int, set[int]] = {}
        for address in addresses[phase * lanes : (phase + 1) * lanes]:
            for byte in range(address, address + access_bytes):
                words_of.setdefault(byte // 4 % 32, set()).add(byte // 4)
        assert found == max(len(words) for words in words_of.values())


@pytest.mark.parametrize("row_bytes", [128, 256, 512])
@pytest.mark.parametrize("access_bytes", [4, 16])
def test_padding_removes_conflicts(row_bytes: int, access_bytes: int) -> None:
    assert wavefronts(column_walk(32, row_bytes), access_bytes).degree > 1
    assert wavefronts(column_walk(32, padded(row_bytes, access_bytes)), access_bytes).degree == 1


@pytest.mark.parametrize("row_bytes", [128, 256, 512])
def test_a_swizzle_removes_conflicts_of_wide_accesses(row_bytes: int) -> None:
    swizzled = xor_swizzled(column_walk(32, row_bytes), row_bytes)
    assert wavefronts(swizzled, 16).phases == (1, 1, 1, 1)


def test_a_swizzle_by_wide_units_leaves_narrow_accesses_some_conflicts() -> None:
    assert wavefronts(xor_swizzled(column_walk(16, 256), 256)).degree == 2


@pytest.mark.parametrize(("unit_bytes", "phases"), [(16, 8), (4, 32), (8, 4)])
def test_a_swizzle_permutes_the_tile(unit_bytes: int, phases: int) -> None:
    tile = range(0, 64 * 128, unit_bytes)
    assert sorted(xor_swizzled(tile, 128, unit_bytes=unit_bytes, phases=phases)) == list(tile)


@pytest.mark.parametrize(
    ("addresses", "access_bytes", "says"),
    [
        ([0], 12, "must be one of 1, 2, 4, 8, 16"),
        ([], 4, "1 to 32 active lanes"),
        ([0] * 33, 4, "got 33"),
        ([2], 4, "multiples of the 4 bytes"),
        ([-4], 4, "but got -4"),
    ],
)
def test_impossible_accesses_are_refused(addresses: list[int], access_bytes: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        wavefronts(addresses, access_bytes)


@pytest.mark.parametrize("sizes", [{"row_bytes": 96}, {"row_bytes": 64}, {"row_bytes": 128, "phases": 3}])
def test_impossible_swizzles_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="phases"):
        xor_swizzled([0], **sizes)


# ---- agreement with the compiler, which counts the wavefronts beyond the first of every phase


def compiler_s_excess(tile: tuple[int, int, str], registers: tuple[Any, ...], shared: tuple[Any, ...]) -> int:
    """What Gluon's `bank_conflicts` says for a rows x columns tile in a register layout of one warp and a swizzled
    shared layout; the compiler runs here, for sm_80, and needs no GPU."""
    gluon = pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    language = gluon.language
    if not hasattr(language, "bank_conflicts"):
        pytest.skip("this Triton's Gluon does not count bank conflicts")
    from tests.support.gluon import probe as gluon_probe

    rows, columns, dtype = tile
    held = language.distributed_type(getattr(language, dtype), [rows, columns], language.BlockedLayout(*registers))
    kept = language.shared_memory_descriptor_type(
        getattr(language, dtype), [rows, columns], language.SwizzledSharedLayout(*shared), [rows, columns]
    )
    return gluon_probe.excess(held, kept)


PLAIN = (1, 1, 1, [1, 0])
ONE_ROW_A_LANE = ([1, 1], [32, 1], [1, 1], [1, 0])


@pytest.mark.parametrize(
    ("tile", "registers", "shared", "addresses", "access_bytes"),
    [
        pytest.param(
            (32, 32, "float32"), ([1, 1], [1, 32], [1, 1], [1, 0]), PLAIN, range(0, 128, 4), 4, id="a row of words"
        ),
        pytest.param(
            (16, 64, "float32"),
            ([1, 1], [16, 2], [1, 1], [0, 1]),
            PLAIN,
            [lane % 16 * 256 + lane // 16 * 4 for lane in LANES],
            4,
            id="the worked example: 16 rows of 256 bytes",
        ),
        # The compiler joins a lane's neighbouring words into accesses of 16 bytes.
        pytest.param((32, 32, "float32"), ONE_ROW_A_LANE, PLAIN, column_walk(32, 128), 16, id="a column of float4"),
        pytest.param(
            (32, 32, "float32"),
            ([1, 4], [32, 1], [1, 1], [1, 0]),
            (4, 1, 8, [1, 0]),
            xor_swizzled(column_walk(32, 128), 128),
            16,
            id="a column of float4, swizzled",
        ),
        pytest.param(
            (32, 32, "float32"),
            ONE_ROW_A_LANE,
            (1, 1, 32, [1, 0]),
            xor_swizzled(column_walk(32, 128), 128, unit_bytes=4, phases=32),
            4,
            id="a column of words, swizzled by words",
        ),
        pytest.param(
            (32, 64, "float16"),
            ([1, 8], [32, 1], [1, 1], [1, 0]),
            (8, 1, 1, [1, 0]),
            column_walk(32, 128),
            16,
            id="a column of eight halves",
        ),
        pytest.param(
            (32, 64, "float16"),
            ([1, 8], [32, 1], [1, 1], [1, 0]),
            (8, 1, 8, [1, 0]),
            xor_swizzled(column_walk(32, 128), 128),
            16,
            id="a column of eight halves, swizzled",
        ),
        pytest.param(
            (32, 64, "float16"),
            ([1, 8], [32, 1], [1, 1], [1, 0]),
            (8, 1, 4, [1, 0]),
            xor_swizzled(column_walk(32, 128), 128, phases=4),
            16,
            id="a column of eight halves, half swizzled",
        ),
    ],
)
def test_the_compiler_counts_the_same(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tile: tuple[int, int, str],
    registers: tuple[Any, ...],
    shared: tuple[Any, ...],
    addresses: Any,
    access_bytes: int,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compiler_s_excess(tile, registers, shared) == wavefronts(list(addresses), access_bytes).degree - 1
