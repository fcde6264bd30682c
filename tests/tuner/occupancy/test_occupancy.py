"""The occupancy model: golden vectors, published cases, inverse tables, brute force, and the words."""

import csv
import json
import pickle
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.limits import MAX_REGISTERS_PER_THREAD, known_ccs, limits_for, parse_cc
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.occupancy.calculator import (
    Limiter,
    Occupancy,
    occupancy,
    registers_for,
    requirement,
    shared_bytes_for,
    tensor_memory_blocks,
)
from blocktune.tuner.occupancy.text import text_of_occupancy
from blocktune.tuner.occupancy.waves import Waves

pytestmark = pytest.mark.triton_free

VECTORS = Path(__file__).parents[2] / "data" / "occupancy_golden.csv"
GOLDEN = list(csv.DictReader(VECTORS.read_text(encoding="utf-8").splitlines()))
COLUMNS = {
    Limiter.WARPS: ("lim_warps", 1),
    Limiter.REGISTERS: ("lim_regs", 2),
    Limiter.SHARED_MEMORY: ("lim_smem", 4),
    Limiter.BLOCKS: ("lim_blocks", 8),
    Limiter.BARRIERS: ("lim_barriers", 16),
}


def analysed(
    cc: str, *, warps: int = 4, registers: int = 32, shared: int = 0, carveout: int | None = None, **more: int
) -> Occupancy:
    resources = KernelResources(num_warps=warps, registers=registers, shared_bytes=shared, tensor_cores="none", **more)
    return occupancy(resources, limits_for(parse_cc(cc)), carveout_percent=carveout)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=f"{row['cc']}-{row['num_warps']}w-{row['regs']}r-{row['dyn_smem']}B") for row in GOLDEN],
)
def test_golden_vector(row: dict[str, str]) -> None:
    carveout = int(row["carveout"])
    result = analysed(
        row["cc"],
        warps=int(row["num_warps"]),
        registers=int(row["regs"]),
        shared=int(row["dyn_smem"]),
        barriers=int(row["barriers"]),
        carveout=None if carveout < 0 else carveout,
    )
    for limiter, (column, _) in COLUMNS.items():
        assert result.limit_blocks[limiter] == (None if row[column] == "inf" else int(row[column])), limiter
    assert result.blocks_per_sm == int(row["blocks_per_sm"])
    assert result.active_warps == int(row["active_warps"])
    assert 100 * result.fraction == pytest.approx(float(row["occupancy_pct"]), abs=0.005)
    assert sum(COLUMNS[limiter][1] for limiter in result.limiters) == int(row["limit_mask"])


def test_there_are_all_golden_vectors() -> None:
    assert len(GOLDEN) == 31


@pytest.mark.parametrize(("shared", "blocks", "fraction"), [(28 * 1024, 2, 0.25), (12 * 1024, 5, 0.625)])
def test_rtx_2070(shared: int, blocks: int, fraction: float) -> None:
    resources = KernelResources(num_warps=4, registers=64, shared_bytes=shared, tensor_cores="none")
    result = occupancy(resources, device_named("rtx2070").limits)
    assert (result.blocks_per_sm, result.fraction) == (blocks, fraction)
    assert result.binding == result.limiters == (Limiter.SHARED_MEMORY,)


def test_the_reserve_of_one_kib_counts() -> None:
    """A published example (H100, 12 KB a block) says 19 blocks because it forgets the reserve."""
    assert analysed("9.0", warps=1, registers=8, shared=12 * 1024).blocks_per_sm == 17
    assert analysed("8.0", shared=82 * 1024).blocks_per_sm == 1  # 2 without the reserve


def test_registers_belong_to_a_sub_partition() -> None:
    """kokkos #5739: 7 warps of 92 registers; the file alone would hold three blocks."""
    result = analysed("8.0", warps=7, registers=92)
    assert (result.blocks_per_sm, result.limiters) == (2, (Limiter.REGISTERS,))


def test_static_shared_memory_counts_like_dynamic() -> None:
    together = analysed("9.0", shared=100_000)
    parted = analysed("9.0", shared=60_000, static_shared_bytes=40_000)
    assert together.limit_blocks == parted.limit_blocks


def test_barriers_keep_what_bound_before_them_on_nvidias_list_but_not_on_ours() -> None:
    result = analysed("9.0", registers=64, shared=1000, barriers=16)
    assert result.limiters == (Limiter.REGISTERS, Limiter.BARRIERS)
    assert result.binding == (Limiter.BARRIERS,)


SHARED_TABLE = {
    ("7.5",): (65536, 32768, 21760, 16384, 13056, 10752, 9216, 8192),
    ("8.0", "8.7"): (166912, 82944, 54912, 40960, 32512, 26880, 22912, 19968),
    ("8.6", "8.9", "12.0", "12.1"): (101376, 50176, 33024, 24576, 19456, 16000, 13568, 11776),
    ("9.0", "10.0", "10.3", "11.0"): (232448, 115712, 76800, 57344, 45568, 37888, 32256, 28160),
}
REGISTER_TABLE = {
    1: (255, 255, 255, 255, 255, 255, 255, 255, 168, 128),
    2: (255, 255, 255, 255, 168, 168, 128, 128, 80, 64),
    4: (255, 255, 168, 128, 96, 80, 72, 64, 40, 32),
    8: (255, 128, 80, 64, 48, 40, 32, 32, 16, 16),
    16: (128, 64, 40, 32, 24, 16, 16, 16, 8, 8),
}


@pytest.mark.parametrize("ccs", SHARED_TABLE, ids=lambda ccs: ccs[0])
def test_inverse_table_of_shared_memory(ccs: tuple[str, ...]) -> None:
    for cc in ccs:
        limits = limits_for(parse_cc(cc))
        assert tuple(shared_bytes_for(blocks, limits) for blocks in range(1, 9)) == SHARED_TABLE[ccs]


@pytest.mark.parametrize("warps", REGISTER_TABLE)
def test_inverse_table_of_registers(warps: int) -> None:
    for cc in known_ccs():
        found = tuple(registers_for(blocks, warps, limits_for(cc)) for blocks in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16))
        assert found == REGISTER_TABLE[warps]


@pytest.mark.parametrize("cc", ["7.0", "7.5", "8.0", "8.9", "9.0", "12.0"])
@pytest.mark.parametrize("carveout", [None, 0, 30, 100])
def test_inverse_of_shared_memory_is_the_largest_that_works(cc: str, carveout: int | None) -> None:
    limits = limits_for(parse_cc(cc))
    for blocks in range(1, limits.max_blocks_per_sm + 1):
        most = shared_bytes_for(blocks, limits, carveout_percent=carveout)
        if most is None:
            assert analysed(cc, shared=0, carveout=carveout).limit_blocks[Limiter.SHARED_MEMORY] < blocks
            continue
        fits = analysed(cc, shared=most, carveout=carveout).limit_blocks[Limiter.SHARED_MEMORY]
        assert fits is None or fits >= blocks
        for more in range(most + 1, limits.shared_per_block_optin_bytes + 2, 1024):
            assert analysed(cc, shared=more, carveout=carveout).limit_blocks[Limiter.SHARED_MEMORY] < blocks


@pytest.mark.parametrize("warps", [1, 2, 3, 4, 7, 8, 9, 16, 31, 32])
def test_inverse_of_registers_is_the_largest_that_works(warps: int) -> None:
    for blocks in range(1, 64 // warps + 1):
        most = registers_for(blocks, warps, limits_for((9, 0)))
        assert most is not None
        assert analysed("9.0", warps=warps, registers=most).limit_blocks[Limiter.REGISTERS] >= blocks
        if most < MAX_REGISTERS_PER_THREAD:
            assert analysed("9.0", warps=warps, registers=most + 1).limit_blocks[Limiter.REGISTERS] < blocks


def test_no_amount_is_small_enough() -> None:
    limits = limits_for((9, 0))
    assert shared_bytes_for(229, limits) is None  # 228 reserves of 1 KiB fill the SM
    assert registers_for(1000, 8, limits) is None
    assert requirement(65, 1, limits).num_warps is None


def test_requirement_of_three_blocks() -> None:
    three = requirement(3, 4, limits_for((9, 0)))
    assert (three.registers, three.shared_bytes, three.num_warps, three.barriers) == (168, 76_800, 21, 21)


def test_carveouts() -> None:
    assert analysed("9.0", shared=57_344).smallest_carveout_kib == 228
    assert analysed("9.0", registers=255, shared=10_000).smallest_carveout_kib == 32  # two blocks of 11,008 B
    assert analysed("8.0", registers=40, carveout=50).shared_capacity_bytes == 100 * 1024
    assert analysed("8.0", registers=40, shared=30_000, carveout=0).shared_capacity_bytes == 32 * 1024


def test_tensor_memory_is_a_limit_of_its_own() -> None:
    assert tensor_memory_blocks(256, limits_for((10, 0))) == 2
    assert tensor_memory_blocks(0, limits_for((10, 0))) is None
    assert tensor_memory_blocks(256, limits_for((9, 0))) is None


def test_waves() -> None:
    waves = Waves(grid_blocks=396, resident_blocks=264)
    assert (waves.count, waves.efficiency) == (1.5, 0.75)


@pytest.mark.parametrize(
    "change", [{"warps": 0}, {"registers": -1}, {"shared": -1}, {"barriers": -1}, {"carveout": 101}, {"carveout": -1}]
)
def test_bad_input(change: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        analysed("9.0", **change)
    with pytest.raises(UsageError, match="at least 1"):
        shared_bytes_for(0, limits_for((9, 0)))


def test_json() -> None:
    data = json.loads(json.dumps(analysed("8.0", warps=8, registers=255, shared=65536).to_json()))
    assert (data["blocks_per_sm"], data["active_warps"], data["occupancy"]) == (1, 8, 0.125)
    assert data["limits"] == {"warps": 8, "blocks": 32, "registers": 1, "shared_memory": 2, "barriers": None}
    assert data["limiters"] == ["registers"]
    assert data["requirements"][1] == {"blocks": 2, "registers": 128, "shared_bytes": 82_944, "num_warps": 32}


def test_a_result_travels_between_processes() -> None:
    result = analysed("9.0", shared=115_712)
    assert pickle.loads(pickle.dumps(result)) == result
    assert hash(result) == hash(analysed("9.0", shared=115_712))


def test_the_worked_example_in_words() -> None:
    result = analysed("9.0", registers=255, shared=131_072, stack_bytes=120, spill_bytes=96)
    text = text_of_occupancy(
        result,
        alternatives={"num_stages 3→2": 98_304, "num_stages 3→4": 163_840},
        waves=Waves(grid_blocks=512, resident_blocks=132),
    )
    for words in (
        "1 block/SM on compute capability 9.0: 4 of 64 warps, 6.25 % occupancy.",
        "Limited by shared memory: the block needs 131,072 B + 1,024 B reserved = 132,096 B, the SM has 233,472 B.",
        "warps 16, blocks 32, registers 2 (255/thread), barriers 64.",
        "For 2 blocks you need ≤ 115,712 B of shared memory (now 131,072): num_stages 3→2 gives 98,304 B.",
        "255 registers with a 120 B stack, 96 B of it spilled registers.",
        "3.88 waves of 132",
        "Higher occupancy is not the goal",
    ):
        assert words in text
    assert "163,840" not in text


def test_whose_warps_are_all_in_use_has_no_higher_occupancy_to_be_warned_of() -> None:
    result = analysed("9.0", registers=32, shared=0)
    assert result.fraction == 1.0
    text = text_of_occupancy(result)
    assert "there is nothing to lift" in text
    assert "not the goal" not in text


def test_words_of_a_tie_name_both_and_what_lifts_both() -> None:
    text = text_of_occupancy(analysed("9.0", warps=8, registers=212, shared=229_376))
    assert "Limited by registers and shared memory, which tie: " in text
    assert (
        "For 2 blocks you need ≤ 128 registers/thread (now 212) and ≤ 115,712 B of shared memory (now 229,376)." in text
    )


def test_words_for_three_blocks() -> None:
    text = text_of_occupancy(analysed("9.0", registers=168, shared=115_712))
    assert "3 blocks ≤ 168 registers and ≤ 76,800 B" in text


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (analysed("8.0", shared=166_913), "cannot be launched"),
        (analysed("8.0", shared=166_913), "+ 127 B rounding = 168,064 B, a block may ask for 166,912 B"),
        (analysed("8.0", warps=9, registers=224), "9 warps, counted as 12 over 4 sub-partitions, and may take 65,536"),
        (analysed("9.0", warps=40), "the block has 40 warps, a block may have 32"),
        (analysed("9.0", registers=32), "All warps of the SM are in use"),
        (analysed("7.5", warps=1, registers=16), "Nothing lifts the limit of 16 blocks"),
        (analysed("9.0", registers=64, barriers=16), "For 5 blocks you need ≤ 12 barriers (now 16)"),
        (analysed("8.0", warps=12, registers=32), "For 6 blocks you need ≤ 10 warps per block (now 12)"),
        (analysed("8.0", shared=8192, carveout=0), "preference of 0 % gives 16 KiB"),
        (analysed("8.0", shared=8192, carveout=0), "For 2 blocks you need ≤ 3,072 B"),
        (analysed("7.5", shared=28 * 1024), "the block needs 28,672 B, the SM has 65,536 B"),
    ],
)
def test_words_of_other_cases(result: Occupancy, words: str) -> None:
    assert words in text_of_occupancy(result)


def test_words_outside_nvidias_model() -> None:
    text = text_of_occupancy(
        analysed("10.0", registers=64), tensor_memory_columns=256, waves=Waves(grid_blocks=8, resident_blocks=148)
    )
    assert "Not in NVIDIA's model: a block takes 256 of 512 columns of tensor memory, enough for 2 blocks/SM" in text
    assert "it does not fill the GPU" in text


def test_alternatives_that_do_not_help_are_named_too() -> None:
    text = text_of_occupancy(analysed("9.0", registers=168, shared=131_072), alternatives={"num_stages 3→4": 163_840})
    assert "; not enough: num_stages 3→4 gives 163,840 B." in text
