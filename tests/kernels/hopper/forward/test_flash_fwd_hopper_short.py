"""The Hopper forward for short sequences: its rules, and its machine code compiled without a GPU.

What its source computes is tested in test_flash_fwd_hopper_short_source.py, results in
test_flash_fwd_hopper_short_gpu.py.
"""

import re
from itertools import product
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.hopper.forward.short.kernel import MOST_KEYS, FlashForwardHopperShort, joins_tiles, output_panels
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.tiles_by_kernel import on_chip_of
from tests.kernels.hopper.forward.test_flash_fwd_hopper import MASKS, loaded, shape
from tests.kernels.hopper.forward.test_hopper_fwd_machine_code import (
    cache,
    exponentials_between_the_waits,
    main_loops,
    name_of,
    positions,
)
from tests.support.compiles.measures import compile_resources
from tests.support.machine_code.kernels import machine_code
from tests.support.triton_modes import TRITON, compiled_here

__all__ = ["cache"]
HOPPER = limits_for((9, 0))
KERNEL = FlashForwardHopperShort()


def config(**changes: int) -> KernelConfig:
    smallest = {name: min(choices) for name, choices in KERNEL.parameters.items()}
    return KernelConfig.of(KERNEL.name, smallest | changes)


WIDTH_PAIRS = [pair for pair in product((64, 128, 256), repeat=2) if pair != (256, 256)]

# ---- rules


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (shape(seqlen=1024, dtype="float32"), "computes float16 and bfloat16, but got float32"),
        (shape(16, 1024), r"`24 <= head_dim <= 256`, a multiple of 8, must hold .* head_dim=16"),
        (shape(96, 1024), r"tiles of head_dim 64, 128 or 256, but head_dim=96 takes 96: flash_fwd_hopper has those"),
        (shape(128, 1024, head_dim_v=160), r"but head_dim_v=160 takes 192"),
        (shape(256, 512), r"leaves head_dim 256 to flash_fwd_hopper"),
        (
            shape(64, seqlen_k=2049),
            r"`seqlen_k <= 2048` must hold .* at head_dim 64, .* seqlen_k=2049: .* flash_fwd_hopper",
        ),
        (
            shape(64, seqlen_k=1025, head_dim_v=128),
            r"`seqlen_k <= 1024` must hold .* at head_dim 128, .* seqlen_k=1025",
        ),
        (shape(seqlen=1024, features="window=3:0"), "does not know window"),
        (shape(seqlen=1024, features="varlen"), "does not know varlen"),
        (shape(seqlen=1024, features="softcap"), "does not know softcap"),
    ],
)
def test_shapes_that_it_leaves_to_others(problem: AttentionShape, reason: str) -> None:
    told = KERNEL.unsupported(problem, HOPPER)
    assert told is not None
    assert re.search(reason, told)
    assert KERNEL.violations(config(), problem, HOPPER) == (told,)


def first_of(head_dim: int, seqlen: int, **sizes: int) -> str:
    return kernels_for(shape(head_dim, seqlen=seqlen, **sizes), HOPPER)[0].name


def test_short_sequences_take_it_first_and_long_ones_the_other() -> None:
    most = MOST_KEYS[64]
    first = [first_of(64, seqlen, batch=8, num_heads=16, num_heads_kv=16) for seqlen in (384, 512, most, 2 * most)]
    assert first == [FlashForwardHopper.name, KERNEL.name, KERNEL.name, FlashForwardHopper.name]
    assert first_of(64, 512) == FlashForwardHopper.name  # tiles of one wave


def test_at_128_columns_it_goes_first_only_where_three_consumers_have_fewer_rows() -> None:
    """18 batches of 16 heads: five tiles of 192 rows are dealt out in 11 turns, eight of 128 in 18."""
    assert [first_of(128, seqlen) for seqlen in (512, 1000, 1024)] == [FlashForwardHopper.name] * 3
    assert first_of(128, 900, batch=18, num_heads=16, num_heads_kv=16) == KERNEL.name
    problem = shape(128, seqlen=900, batch=18, num_heads=16, num_heads_kv=16)
    assert KERNEL.default_config(problem, HOPPER).block_m == 192


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [*WIDTH_PAIRS, (40, 120), (200, 104)])
def test_default_config_is_feasible(head_dim: int, head_dim_v: int, causal: Causal) -> None:
    for seqlen_q, seqlen_k in product((1, 1000, 16384), (77, 1000, 1024)):
        problem = shape(head_dim, causal=causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim_v=head_dim_v)
        assert KERNEL.unsupported(problem, HOPPER) is None
        assert KERNEL.violations(KERNEL.default_config(problem, HOPPER), problem, HOPPER) == ()


@pytest.mark.parametrize(
    ("problem", "values"),
    [
        *((loaded(64, seqlen, causal), (256, 64, 4, 0, 1, 0)) for seqlen, causal in product((512, 2048), MASKS)),
        (loaded(64, 2048, seqlen_q=100), (128, 128, 4, 0, 0, 1)),
        *((loaded(128, seqlen, causal), (128, 64, 4, 0, 0, 0)) for seqlen, causal in product((512, 1024), MASKS)),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionShape) else "x".join(map(str, value)),
)
def test_default_config_is_what_won(problem: AttentionShape, values: tuple[int, ...]) -> None:
    names = ("block_m", "block_n", "num_stages", "split_release", "early_p", "keep_p")
    found = KERNEL.default_config(problem, HOPPER).parameters
    assert tuple(found[name] for name in names) == values


@pytest.mark.parametrize(("width", "width_v"), WIDTH_PAIRS)
def test_barriers_fit_beside_the_largest_tiles(width: int, width_v: int) -> None:
    """`shared_bytes` leaves out up to 1 KiB, which decides nothing: no config comes that near to what a block has."""
    problem = shape(width, 1024, head_dim_v=width_v)
    space = SearchSpace.build(problem, HOPPER, [KERNEL])
    sizes = [KERNEL.shared_bytes(found, problem, HOPPER) for found in space.feasible]
    assert max(sizes) + 1024 <= HOPPER.shared_per_block_optin_bytes


def test_the_output_has_the_memory_that_is_left() -> None:
    """Panels of 64 columns that divide those of a head."""

    def panels(problem: AttentionShape, **changes: int) -> tuple[int, int]:
        found = config(**changes)
        assert KERNEL.violations(found, problem, HOPPER) == ()
        on_chip = on_chip_of(KERNEL, found, problem, HOPPER)
        assert on_chip is not None
        (leaving,) = (tile for tile in on_chip.tiles if tile.name == "O on its way out")
        assert leaving.columns == 64 * output_panels(found, problem)
        return output_panels(found, problem), KERNEL.shared_bytes(found, problem, HOPPER) >> 10

    assert panels(shape(64, 2048)) == (1, 64)
    assert panels(shape(128, 1024), block_n=128) == (2, 192)
    assert panels(shape(128, 1024, head_dim_v=256), num_stages=3) == (2, 208)  # two of four
    assert panels(shape(128, 1024, head_dim_v=256)) == (4, 192)
    (text,) = KERNEL.violations(config(block_n=128, num_stages=3), shape(128, 1024), HOPPER)
    assert "needs 245760 B" in text


@pytest.mark.parametrize(
    ("problem", "changes", "joined"),
    [
        (shape(256, 1024, head_dim_v=128), {}, True),
        (shape(128, seqlen_k=1000), {}, True),
        (shape(128, seqlen_k=1000), {"block_m": 192}, False),
        (shape(128, 1024, causal=Causal.UPPER_LEFT), {"block_n": 128}, True),
        (shape(128, 1024, causal=Causal.UPPER_LEFT), {}, False),  # the upper rows skip a block of 64 keys
        (shape(128, seqlen_q=100, seqlen_k=1000, causal=Causal.LOWER_RIGHT), {"block_n": 128}, False),
    ],
)
def test_tiles_are_joined_where_nothing_is_skipped(
    problem: AttentionShape, changes: dict[str, int], joined: bool
) -> None:
    assert joins_tiles(config(**changes), problem) == joined


# ---- machine code

COMPILED = [
    loaded(64, 1024),
    *(loaded(128, 1024, causal) for causal in MASKS),
    *(loaded(256, 1024, causal, head_dim_v=128) for causal in MASKS),
    shape(128, seqlen_q=1000, seqlen_k=1010, causal=Causal.LOWER_RIGHT),
]


@compiled_here
@pytest.mark.few(1)
@pytest.mark.parametrize("problem", COMPILED, ids=lambda problem: problem.label)
def test_default_config_compiles_to_what_it_is_meant_to_be(problem: AttentionShape, cache: Path) -> None:
    best = KERNEL.default_config(problem, HOPPER)
    resources = compile_resources(KERNEL, best, problem, (9, 0))
    consumers, scores = best.block_m // 64, 64 * best.block_n // 128
    assert resources.num_warps == KERNEL.total_warps(best)
    assert occupancy(resources, HOPPER).blocks_per_sm == 1
    assert estimated_resources(KERNEL, best, problem, device_named("h200")).registers == resources.registers
    assert resources.spill_bytes <= spills(problem)
    assert 0 <= resources.shared_bytes - KERNEL.shared_bytes(best, problem, HOPPER) <= 1024
    code = machine_code(KERNEL, best, problem, cache)
    loops = [loop for loop in main_loops(code) if not any(name.startswith("UTMASTG") for name in loop)]
    assert len(loops) == consumers
    for loop in loops:
        exponentials_between_the_waits(loop, scores)
        if TRITON < (3, 9):
            assert not [name for name in loop if name.startswith(("LDL", "STL"))]  # no spill inside the loop
    for border in borders(code, consumers):
        if joins_tiles(best, problem):
            exponentials_between_the_waits(border, scores)
        else:
            the_output_leaves_beside_the_scores(border)


def spills(problem: AttentionShape) -> int:
    """The most bytes that may spill, rounded up from what was seen: 56 with Triton 3.6, none of them in a step's loop;
    with 3.9 up to 148 at head_dim 128.
    """
    if TRITON >= (3, 9):
        return 256 if problem.head_dim == 64 else 160
    return 64 if problem.head_dim > 64 else 0


def the_output_leaves_beside_the_scores(border: list[str]) -> None:
    """Behind the last product the next tile's scores are issued, and the output leaves ahead of the wait for them."""
    product_wait, scores_wait = positions(border, "DEPBAR 0")
    issued = [place for place in positions(border, "HGMMA") if place > product_wait]
    copies = [place for place, name in enumerate(border) if name.startswith("UTMASTG")]
    assert issued
    assert copies
    assert max(issued) < min(copies)
    assert max(copies) < scores_wait


def borders(code: list[tuple[int, str]], consumers: int) -> list[list[str]]:
    """Of every consumer what stands between two tiles, by the names of its instructions, up to its last wait.

    It has five waits for matrix products: the first tile's scores, two of a step, two between tiles. More would be
    ptxas' own, which then finds that registers of products in flight are used.
    """
    names = [name_of(text) for _, text in code]
    waits = [place for place, name in enumerate(names) if name.startswith("DEPBAR ")]
    assert len(waits) == 5 * consumers
    return [names[waits[5 * number + 2] + 1 : waits[5 * number + 4] + 1] for number in range(consumers)]
