"""The 8-bit forward of Hopper: its rules, and its machine code compiled without a GPU.

What its source computes is tested in test_flash_fwd_fp8_source.py, results in test_flash_fwd_fp8_gpu.py.
"""

import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.hopper.fp8.kernel import FlashForwardFp8
from blocktune.kernels.registry import KERNELS, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal, Direction
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.compile.compiler import options_of, source_of
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.tiles_by_kernel import on_chip_of
from blocktune.tuner.traffic.by_kernel import traffic_of
from tests.kernels.hopper.forward.test_hopper_fwd_machine_code import main_loops, positions
from tests.support.compiles.measures import fresh_resources
from tests.support.machine_code.kernels import machine_code
from tests.support.triton_modes import TRITON, compiled_here

HOPPER = limits_for((9, 0))
KERNEL = FlashForwardFp8()


def shape(
    head_dim: int = 64, seqlen: int = 8192, causal: Causal = Causal.NONE, features: str = "", **changes: Any
) -> AttentionShape:
    sizes = {"batch": 2, "num_heads": 8, "num_heads_kv": 8, "seqlen_q": seqlen, "seqlen_k": seqlen, "dtype": FP8}
    sizes |= {"head_dim": head_dim, "head_dim_v": head_dim}
    return AttentionShape(**sizes | {"causal": causal, "features": Features.parse(features)} | changes)


def config(**changes: int) -> KernelConfig:
    smallest = {name: min(choices) for name, choices in KERNEL.parameters.items()}
    return KernelConfig.of(KERNEL.name, smallest | changes)


# ---- rules


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (shape(dtype="bfloat16"), f"computes {FP8}, but got bfloat16"),
        (shape(32), r"`48 <= head_dim <= 256`, a multiple of 16, must hold .* head_dim=32"),
        (shape(72), r"a multiple of 16, must hold .* head_dim=72"),
        (shape(128, head_dim_v=272), r"`48 <= head_dim_v <= 256`, .* head_dim_v=272"),
        (shape(features="window=3:0"), "does not know window"),
        (shape(features="varlen"), "does not know varlen"),
        (shape(direction=Direction.BACKWARD), "computes forward, but got a backward shape"),
    ],
)
def test_shapes_that_it_leaves_to_others(problem: AttentionShape, reason: str) -> None:
    told = KERNEL.unsupported(problem, HOPPER)
    assert told is not None
    assert re.search(reason, told)
    assert KERNEL.violations(config(), problem, HOPPER) == (told,)


@pytest.mark.parametrize("cc", [cc for cc in known_ccs() if cc != (9, 0)], ids=str)
def test_only_hopper_has_wgmma(cc: tuple[int, int]) -> None:
    assert f"(compute capability 9.0 alone), but got {cc[0]}.{cc[1]}" in (
        KERNEL.unsupported(shape(), limits_for(cc)) or ""
    )


def test_no_other_kernel_takes_8_bits() -> None:
    assert [kernel.name for kernel in kernels_for(shape(128), HOPPER)] == [KERNEL.name]
    for kernel in KERNELS.values():
        assert kernel.name == KERNEL.name or "float8_e4m3fn" in (
            kernel.unsupported(shape(direction=kernel.direction), HOPPER) or ""
        )


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [*product((64, 128, 256), repeat=2), (48, 80), (96, 96)])
def test_default_config_is_feasible(head_dim: int, head_dim_v: int, causal: Causal) -> None:
    for seqlen_q, seqlen_k in product((1, 1000, 16384), (77, 4096, 1 << 20)):
        problem = shape(head_dim, causal=causal, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim_v=head_dim_v)
        assert KERNEL.unsupported(problem, HOPPER) is None
        assert KERNEL.violations(KERNEL.default_config(problem, HOPPER), problem, HOPPER) == ()


@pytest.mark.parametrize(
    ("problem", "constants"),
    [
        (shape(), (False, False, True)),
        (shape(seqlen_k=1000), (True, False, True)),
        (shape(causal=Causal.UPPER_LEFT), (False, True, True)),
        (shape(seqlen=1000, causal=Causal.UPPER_LEFT), (False, True, True)),
        (shape(seqlen_q=1300, seqlen_k=1000, causal=Causal.UPPER_LEFT), (True, True, True)),
        (shape(seqlen_q=1000, seqlen_k=1300, causal=Causal.LOWER_RIGHT), (False, True, False)),
        (shape(seqlen_q=1300, seqlen_k=1000, causal=Causal.LOWER_RIGHT), (False, True, False)),
        (shape(seqlen_q=1000, seqlen_k=1512, causal=Causal.LOWER_RIGHT), (False, True, True)),
    ],
    ids=lambda value: value.label if isinstance(value, AttentionShape) else "",
)
def test_masks(problem: AttentionShape, constants: tuple[bool, bool, bool]) -> None:
    spec = KERNEL.compile_spec(config(), problem)
    options = spec.constexprs[(spec.function.arg_names.index("OPTIONS"),)]
    assert constants == (options.RAGGED, options.RIGHT, options.ALIGNED)


def test_tiles_of_the_default_config() -> None:
    """Three or four consumers where heads are narrow."""
    causal, narrow = {"causal": Causal.UPPER_LEFT}, {"head_dim_v": 64}
    problems = shape(64), shape(64, **causal), shape(64, seqlen_q=128), shape(64, head_dim_v=128), shape(128, **narrow)
    assert [KERNEL.default_config(problem, HOPPER).block_m for problem in problems] == [192, 256, 128, 128, 128]


def test_tensors_that_it_takes() -> None:
    q = torch.empty(2, 4, 256, 64, dtype=torch.float8_e4m3fn)
    rows = torch.empty(2, 256, 4, 72, dtype=torch.float8_e4m3fn).transpose(1, 2)[..., :64]
    by_tokens = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert KERNEL.layout_problem(q, by_tokens, by_tokens) is None
    for name, tensors in (("query", (rows, q, q)), ("key", (q, rows, q)), ("value", (q, q, rows))):
        told = f"rows of {name} must be contiguous, and 16 must divide its address and its strides in bytes"
        assert KERNEL.layout_problem(*tensors) == f"{told}, for {KERNEL.name}"
    assert "must be contiguous" in (KERNEL.layout_problem(q, q, q.transpose(2, 3)) or "")


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize(("head_dim", "most"), [(64, (4096, 4096)), (128, (2048, 2048)), (256, (1024, 2048))])
def test_values_that_few_queries_read_are_transposed_on_the_chip(
    head_dim: int, most: tuple[int, int], causal: Causal
) -> None:
    """And a pass before serves many queries: those of a group read the same values."""
    length = most[causal is not Causal.NONE]
    for problem, turns in (
        (shape(head_dim, length, causal), 1),
        (shape(head_dim, 2 * length, causal), 0),
        (shape(head_dim, length, causal, num_heads_kv=4), 0),
    ):
        best = KERNEL.default_config(problem, HOPPER)
        assert best.parameters["turn_values"] == turns
        assert len(KERNEL.further_specs(best, problem)) == 1 - turns
        assert KERNEL.compile_spec(best, problem).options.get("launch_pdl", 0) == 1 - turns


# ---- what the models make of it


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_models_know_one_byte_an_element(head_dim: int) -> None:
    problem, wide = shape(head_dim), shape(head_dim, dtype="bfloat16")
    best, device = KERNEL.default_config(problem, HOPPER), device_named("h200")
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    moved = traffic_of(KERNEL, best, problem, perfect_l2=True)
    assert moved.total_bytes == rows * head_dim * (1 + 1 + 1 + 2 + 2)  # q, k, vt read, v turned, output
    assert problem.tensor_bytes == rows * (5 * head_dim + 4)
    itself = KernelConfig.of(KERNEL.name, dict(best.parameters) | {"turn_values": 1})
    assert traffic_of(KERNEL, itself, problem, perfect_l2=True).total_bytes == rows * head_dim * (1 + 1 + 1 + 2)
    on_chip = on_chip_of(KERNEL, best, problem, HOPPER)
    assert on_chip is not None
    assert on_chip.shared_bytes == KERNEL.shared_bytes(best, problem, HOPPER)
    sixteen = FlashForwardHopper()
    slower = usefulness(sixteen, sixteen.default_config(wide, HOPPER), wide, device)
    assert 1.0 < slower / usefulness(KERNEL, best, problem, device) < 2.0


def test_values_of_256_columns_leave_room_for_two_consumers() -> None:
    (told,) = KERNEL.violations(config(block_m=192), shape(128, head_dim_v=256), HOPPER)
    assert told == "`block_m` must be 128 for head_dim_v 256, but got 192."
    space = SearchSpace.build(shape(256), HOPPER, [KERNEL])
    assert {found.block_m for found in space.feasible} == {128}
    assert {found.num_stages for found in space.feasible if found.block_n == 128} == {2}
    best = KERNEL.default_config(shape(256), HOPPER)
    on_chip = on_chip_of(KERNEL, best, shape(256), HOPPER)
    assert on_chip is not None
    assert on_chip.shared_bytes == KERNEL.shared_bytes(best, shape(256), HOPPER)


def test_the_search_has_room() -> None:
    space = SearchSpace.build(shape(128), HOPPER, [KERNEL])
    assert {found.block_m for found in space.feasible} == {128, 192, 256}
    assert {found.num_stages for found in space.feasible if found.block_m == 192} == {2, 3, 4, 5, 6}
    assert all(KERNEL.shared_bytes(found, shape(128), HOPPER) + 1024 <= 232448 for found in space.feasible)


# ---- machine code

LATE_PRODUCTS = 2
"""Those with probabilities, of values and of sums, may still run when the scores are there."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


COMPILED = [  # and the bytes spilled by Triton 3.6 and 3.9
    (shape(64), 0, 64),
    (shape(128, seqlen_q=1000, seqlen_k=3000, causal=Causal.LOWER_RIGHT), 72, 832),
    (shape(256, causal=Causal.UPPER_LEFT, head_dim_v=128), 0, 152),
    (shape(256, causal=Causal.UPPER_LEFT), 0, 188),
]


@compiled_here
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("problem", "spilled", "spilled_later"), COMPILED, ids=[problem.label for problem, *_ in COMPILED]
)
def test_default_config_compiles_to_what_it_is_meant_to_be(
    problem: AttentionShape, spilled: int, spilled_later: int, cache: Path
) -> None:
    """The softmax runs beside the second product, and probabilities stay in their threads (the only exchange is that
    of maxima that are raised)."""
    best = KERNEL.default_config(problem, HOPPER)
    resources = fresh_resources(KERNEL, best, problem, (9, 0))
    assert resources.tensor_cores == "wgmma"
    assert resources.num_warps == KERNEL.total_warps(best)
    assert occupancy(resources, HOPPER).blocks_per_sm == 1
    assert resources.spill_bytes <= (spilled if TRITON < (3, 9) else spilled_later)
    assert 0 <= resources.shared_bytes - KERNEL.shared_bytes(best, problem, HOPPER) <= 1024
    listing = machine_code(KERNEL, best, problem, cache)
    types = {found for _, text in listing for found in re.findall(r"QGMMA\S*\.(E\dM\d\.E\dM\d)", text)}
    assert types == {"E4M3.E4M3"}
    loops = main_loops(listing, LATE_PRODUCTS)
    assert len(loops) == best.block_m // 64
    for loop in loops:
        overlaps(loop, 64 * best.block_n // 128)


TURNED = [
    (shape(64, 512, Causal.UPPER_LEFT), 4),
    (shape(64, 512), 4),
    (shape(128, 1024, Causal.UPPER_LEFT), 8),
    (shape(128, 512), 16),
    (shape(256, 1024), 16),
]
"""And how often a warp reads and writes four small matrices for a tile of values."""


@compiled_here
@pytest.mark.few(1)
@pytest.mark.parametrize(("problem", "moves"), TURNED, ids=[problem.label for problem, _ in TURNED])
def test_two_warps_transpose_by_matrices(problem: AttentionShape, moves: int, cache: Path) -> None:
    """No byte goes alone, and no step of a consumer spills."""
    best = KERNEL.default_config(problem, HOPPER)
    assert best.parameters["turn_values"] == 1
    assert fresh_resources(KERNEL, best, problem, (9, 0)).spill_bytes <= (48 if TRITON < (3, 9) else 192)
    listing = machine_code(KERNEL, best, problem, cache)
    read = sum("LDSM.16.MT88.4" in name for _, name in listing)
    assert read == moves
    for loop in main_loops(listing, LATE_PRODUCTS):
        counts = Counter(name.split(".")[0] for name in loop)
        assert counts["LDL"] + counts["STL"] == counts["PRMT"] == 0
        assert counts["LDS"] == counts["STS"] == 0  # one accumulator sums up all keys


def products_of(body: list[str]) -> list[int]:
    return [place for place, name in enumerate(body) if name.startswith("QGMMA")]


def overlaps(loop: list[str], scores: int) -> None:
    """scores: of a thread and step."""
    counts = Counter(name.split(".")[0] for name in loop)
    (scores_wait,), (product_wait,) = positions(loop, f"DEPBAR {LATE_PRODUCTS}"), positions(loop, "DEPBAR 0")
    exponentials = positions(loop, "MUFU.EX2")
    assert len(exponentials) == scores + 2
    assert max(products_of(loop)) < scores_wait < min(exponentials)
    assert max(exponentials) < product_wait
    assert counts["SHFL"] == 4
    assert counts["FADD"] <= 4  # the tensor cores add probabilities up
    assert counts["F2FP"] == scores // 2
    assert counts["VIMNMX3"] + counts["VIMNMX"] == scores  # three at a time, and once more where a maximum is raised
    assert counts["PRMT"] == 0
    late = [name for name in loop[product_wait:] if name.startswith("F2FP")]
    assert TRITON >= (3, 9) or len(late) == scores // 4  # half of the conversions
    assert counts["LDL"] + counts["STL"] <= (0 if TRITON < (3, 9) else 96)  # no spill inside the loop
    assert counts["LDS"] == counts["STS"] == 0  # stretches end between the loops
    assert counts["BAR"] == 2  # one of them an arrival


@compiled_here
def test_the_pass_over_the_values_moves_16_bytes_at_once(cache: Path) -> None:
    (spec,) = KERNEL.further_specs(config(), shape(128))
    from triton.backends.compiler import GPUTarget

    compiled: Any = triton.compile(source_of(spec), target=GPUTarget("cuda", 90, 32), options=options_of(spec))
    accesses = set(re.findall(r"\b((?:ld|st)\.global\S*)", compiled.asm["ptx"]))
    assert accesses == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert set(re.findall(r"\b(ld\.shared\S*)", compiled.asm["ptx"])) == {"ld.shared.v4.b32"}
