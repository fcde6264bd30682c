"""What the Hopper forward compiles to: its resources, and exponentials between the waits for products."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.occupancy.calculator import occupancy
from tests.kernels.hopper.forward.test_flash_fwd_hopper import HOPPER, KERNEL, loaded, shape
from tests.support.compiles.measures import compile_resources
from tests.support.machine_code.kernels import loops, machine_code, mnemonic
from tests.support.triton_modes import TRITON, compiled_here


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("triton")
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


COMPILED = [
    *(loaded(head_dim, 8192, Causal.UPPER_LEFT) for head_dim in (64, 128)),
    loaded(128, 1024, Causal.UPPER_LEFT),
    shape(96, causal=Causal.UPPER_LEFT),
    shape(256, causal=Causal.UPPER_LEFT),
    shape(192, head_dim_v=128),
    shape(64, seqlen_q=1000, seqlen_k=3000, causal=Causal.LOWER_RIGHT),
    shape(64, seqlen_q=100, seqlen_k=3000),
    loaded(128, 4096, features="window=512:100"),
    shape(128, 4096, Causal.LOWER_RIGHT, "varlen window=512:0 softcap"),
    shape(256, 4096, Causal.LOWER_RIGHT, "varlen"),
    loaded(128, 4096, Causal.UPPER_LEFT, "alibi"),
    loaded(128, 2048, Causal.NONE, "boolean"),
    loaded(128, 4096, Causal.UPPER_LEFT, "additive"),
    loaded(128, 4096, Causal.UPPER_LEFT, "dropout"),
    loaded(64, 4096, Causal.UPPER_LEFT, "boolean"),
    loaded(64, 2048, Causal.NONE, "additive"),
    loaded(64, 4096, Causal.NONE, "alibi"),
    loaded(64, 4096, Causal.UPPER_LEFT, "alibi"),
]


ALSO_COMPILED = [loaded(64, 8192, Causal.NONE), loaded(128, 8192, Causal.NONE), loaded(128, 1024, Causal.NONE)]
"""The masked ones of these have the steps without a mask, too."""


@compiled_here
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "problem",
    [*COMPILED, *(pytest.param(problem, marks=pytest.mark.exhaustive) for problem in ALSO_COMPILED)],
    ids=lambda problem: problem.label,
)
def test_default_config_compiles_to_what_it_is_meant_to_be(problem: AttentionShape, cache: Path) -> None:
    best = KERNEL.default_config(problem, HOPPER)
    resources = compile_resources(KERNEL, best, problem, (9, 0))
    consumers = best.block_m // 64
    assert resources.tensor_cores == "wgmma"
    assert resources.num_warps == KERNEL.total_warps(best) == {2: 12, 3: 16, 4: 20}[consumers]
    assert occupancy(resources, HOPPER).blocks_per_sm == 1
    assert estimated_resources(KERNEL, best, problem, device_named("h200")).registers == resources.registers
    assert resources.spill_bytes <= spills(problem)
    assert 0 <= resources.shared_bytes - KERNEL.shared_bytes(best, problem, HOPPER) <= 1024
    products = 2 if problem.head_dim_v in (96, 192) else 1
    loops = main_loops(machine_code(KERNEL, best, problem, cache), products)
    assert len(loops) == consumers
    for loop in loops:
        exponentials_between_the_waits(loop, 64 * best.block_n // 128, products)
        if TRITON < (3, 9):
            assert not [name for name in loop if name.startswith(("LDL", "STL"))]  # no spill inside the loop


class Sunk(FlashForwardHopper):
    """What calls with sinks compile."""

    def compile_spec(self, config: KernelConfig, shape: AttentionShape) -> CompileSpec:
        spec = super().compile_spec(config, shape)
        place = spec.function.arg_names.index("sinks")
        return replace(
            spec,
            signature=dict(spec.signature) | {"sinks": "*bf16"},
            constexprs={key: value for key, value in spec.constexprs.items() if key != (place,)},
            attrs=dict(spec.attrs) | {(place,): [["tt.divisibility", 16]]},
        )


@pytest.mark.exhaustive
@compiled_here
def test_sinks_stay_out_of_the_loop(cache: Path) -> None:
    problem = loaded(128, 8192, Causal.UPPER_LEFT)
    best = KERNEL.default_config(problem, HOPPER)
    resources = compile_resources(Sunk(), best, problem, (9, 0))
    assert resources.spill_bytes <= spills(problem) + 8
    found = [main_loops(machine_code(kernel, best, problem, cache)) for kernel in (KERNEL, Sunk())]
    for plain, sunk in zip(*found, strict=True):
        assert abs(len(sunk) - len(plain)) <= 8  # addresses and moves
        assert positions(sunk, "MUFU.EX2")[-1] < positions(sunk, "DEPBAR 0")[0]
        assert len(positions(sunk, "MUFU.EX2")) == len(positions(plain, "MUFU.EX2"))


@pytest.mark.exhaustive
@compiled_here
def test_a_soft_cap_takes_one_special_function(cache: Path) -> None:
    problem = loaded(64, 4096, Causal.UPPER_LEFT, "softcap")
    best = KERNEL.default_config(problem, HOPPER)
    for loop in main_loops(machine_code(KERNEL, best, problem, cache)):
        scores = 64 * best.block_n // 128
        assert len(positions(loop, "MUFU.TANH")) == scores
        assert len([name for name in loop if name.startswith("MUFU")]) <= 2 * scores + 2  # and two factors of rows


@pytest.mark.exhaustive
@compiled_here
@pytest.mark.skipif(TRITON >= (3, 9), reason="another ptxas")
@pytest.mark.parametrize(
    ("features", "causal", "most"),
    [
        ("alibi", Causal.UPPER_LEFT, {"FFMA": 1.1}),
        ("alibi", Causal.NONE, {"FFMA": 2.1, "FMUL": 0.1, "FADD": 1.1}),  # one of each under a branch
        ("boolean", Causal.NONE, {"FSEL": 1.1, "LOP3.LUT": 0.2, "R2P": 0.2, "LDG.E": 0.1}),
        ("additive", Causal.NONE, {"FFMA": 1.1, "LDG.E.128": 0.15}),
        ("dropout", Causal.NONE, {"IMAD.WIDE.U32": 0.9, "FSEL": 1.1, "R2P": 0.2}),
    ],
)
def test_features_cost_what_they_are_meant_to(
    features: str, causal: Causal, most: dict[str, float], cache: Path
) -> None:
    """Instructions of a step beside those of a plain one, by score."""
    problem, plain = (loaded(128, 4096, causal, words) for words in (features, ""))
    config = KERNEL.default_config(loaded(128, 4096, Causal.NONE, "alibi"), HOPPER)
    found, without = (
        [Counter(loop) for loop in main_loops(machine_code(KERNEL, config, each, cache))] for each in (problem, plain)
    )
    scores = 64 * config.block_n // 128
    for own, base in zip(found, without, strict=True):
        assert sum(own.values()) > sum(base.values())
        for name, share in most.items():
            assert own[name] - base[name] <= share * scores


@pytest.mark.exhaustive
@compiled_here
@pytest.mark.skipif(TRITON >= (3, 9), reason="another ptxas")
@pytest.mark.parametrize(("causal", "most"), [(Causal.UPPER_LEFT, 16), (Causal.NONE, 128)])
def test_a_line_costs_a_product_and_few_instructions(causal: Causal, most: int, cache: Path) -> None:
    """Of a block whose ALiBi is a line; without a bound, a step also has what corrects another one, under a branch."""
    problem, plain = (loaded(64, 4096, causal, words) for words in ("alibi", ""))
    config = KERNEL.default_config(problem, HOPPER)
    found, without = (main_loops(machine_code(KERNEL, config, each, cache)) for each in (problem, plain))
    for own, base in zip(found, without, strict=True):
        assert own.count("HGMMA") == base.count("HGMMA") + 1
        assert len(own) - len(base) <= most


def spills(problem: AttentionShape) -> int:
    """The most bytes that may spill, rounded up from what was seen: 8 with Triton 3.6 at head_dim 128 and 256, 24 where
    values of a mask are loaded ahead, and 36 with ALiBi, none of them in the loop; with 3.9 up to 280 at head_dim 64,
    where the scores, probabilities and accumulator of a consumer fill 128 of a thread's 160 registers, and up to 104 at
    others.
    """
    if TRITON >= (3, 9):
        return 288 if problem.head_dim == 64 else 128
    if problem.features.mask is MaskKind.ADDITIVE:
        return 24
    if problem.features.alibi:
        return 36
    return 8 if problem.head_dim in (128, 256) else 0


def exponentials_between_the_waits(loop: list[str], scores: int, products: int = 1) -> None:
    """The softmax stands behind the wait for the scores and ahead of the wait for the second product, which therefore
    runs beside it. ptxas likes to move the second wait up; then nothing overlaps and the kernel is far slower.

    products: parts of the second product, each a group that may still run when the scores are there.
    """
    (scores_wait,) = positions(loop, f"DEPBAR {products}")
    (product_wait,) = positions(loop, "DEPBAR 0")
    exponentials = positions(loop, "MUFU.EX2")
    assert len(exponentials) >= scores  # and the factors of the rows
    assert max(positions(loop, "HGMMA")) < scores_wait < min(exponentials)
    assert max(exponentials) < product_wait


def positions(loop: list[str], name: str) -> list[int]:
    return [place for place, found in enumerate(loop) if found == name]


def main_loops(code: list[tuple[int, str]], products: int = 1) -> list[list[str]]:
    """Of every consumer the smallest loop with both waits of the pipeline, by the names of its instructions."""
    smallest: dict[int, list[tuple[int, str]]] = {}
    names = {at: name_of(text) for at, text in code}
    for loop in loops(code):
        body = [(at, names[at]) for at, _ in loop]
        waits = [at for at, name in body if name == f"DEPBAR {products}"]
        if len(waits) == 1 and any(name == "DEPBAR 0" for _, name in body):
            smallest[waits[0]] = min(body, smallest.get(waits[0], body), key=len)
    return [[name for _, name in body] for body in smallest.values()]


def name_of(instruction: str) -> str:
    """MUFU.EX2, HGMMA, or DEPBAR with the matrix products that may still run."""
    wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", instruction)
    if wait:
        return f"DEPBAR {int(wait[1], 16)}"
    name = mnemonic(instruction)
    return "HGMMA" if name.startswith("HGMMA") else name


def test_a_wait_that_moved_up_is_noticed() -> None:
    """The proof that the test above can tell the difference."""
    hidden = ["HGMMA", "DEPBAR 1", *["MUFU.EX2"] * 4, "DEPBAR 0", "BRA"]
    exponentials_between_the_waits(hidden, scores=4)
    with pytest.raises(AssertionError):
        exponentials_between_the_waits(["HGMMA", "DEPBAR 1", "DEPBAR 0", *["MUFU.EX2"] * 4, "BRA"], scores=4)
