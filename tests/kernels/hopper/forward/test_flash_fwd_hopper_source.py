"""The source of the Hopper forward, run on the CPU by tests/support/gluon/machine.py: every length, mask, feature and
parameter.

What the compiler makes of it is not seen here; test_hopper_fwd_machine_code.py reads the machine code, and on a GPU
test_flash_fwd_hopper_gpu.py compares results.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.forward import launch as flash_fwd_hopper
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.tuner.correctness.forward import HARD, PLAIN
from tests.support.gluon import machine as gluon_machine

pytestmark = pytest.mark.triton_free

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

HOPPER = limits_for((9, 0))
KERNEL = FlashForwardHopper()
TOLERANCE = 1e-3
"""Relative Frobenius error of float16 probabilities and outputs."""
LSE_TOLERANCE = 1e-4
EDGES = [(1, 1), (1, 300), (63, 65), (64, 64), (65, 63), (128, 129), (129, 127), (192, 193), (257, 255), (300, 1)]
WINDOWS = [(0, 0), (20, 9), (-1, 3), (64, -1), (63, 0), (100, 128), (300, 300)]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_fwd_hopper, "tile_counter", lambda device: torch.zeros(2, dtype=torch.int32))


def shape_of(
    seqlen_q: int = 200, seqlen_k: int = 200, head_dim: int = 64, features: str = "", **changes: Any
) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_heads_kv": 1, "head_dim_v": head_dim, "dtype": "float16"}
    sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim} | changes
    return AttentionShape(**sizes, features=Features.parse(features))


def config_of(problem: AttentionShape, kernel: FlashForwardHopper = KERNEL, **changes: int) -> KernelConfig:
    default = kernel.default_config(problem, HOPPER)
    return KernelConfig.of(kernel.name, dict(default.parameters) | changes)


def draw(batch: int, heads: int, rows: int, dim: int, layout: str) -> torch.Tensor:
    sizes = (batch, heads, rows, dim) if layout == "bhsd" else (batch, rows, heads, dim)
    drawn = torch.randn(sizes).half()
    return drawn if layout == "bhsd" else drawn.transpose(1, 2)


def tensors(problem: AttentionShape, layout: str = "bhsd", tokens: tuple[int, int] | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    batch, (rows, keys) = problem.batch if tokens is None else 1, tokens or (problem.seqlen_q, problem.seqlen_k)
    return [
        draw(batch, problem.num_heads, rows, problem.head_dim, layout),
        draw(batch, problem.num_heads_kv, keys, problem.head_dim, layout),
        draw(batch, problem.num_heads_kv, keys, problem.head_dim_v, layout),
    ]


def run(
    problem: AttentionShape,
    config: KernelConfig,
    qkv: list[torch.Tensor],
    extras: Extras,
    programs: int,
    kernel: FlashForwardHopper = KERNEL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, 7 where nothing is written."""
    assert kernel.violations(config, problem, HOPPER) == ()
    q = qkv[0]
    out = torch.full((*q.shape[:-1], problem.head_dim_v), 7.0).half()
    lse = torch.full(q.shape[1:3] if problem.features.varlen else q.shape[:3], 7.0)
    launch: Any = (kernel.bind if extras.sinks is None else kernel.bind_with_sinks)(config, problem)
    given = (extras,) if problem.features or extras.sinks is not None else ()
    arguments = launch.arguments(*qkv, out, lse, problem.head_dim**-0.5, *given)
    gluon_machine.run(launch.function, arguments, programs)
    (counter,) = (
        each for each in arguments if isinstance(each, torch.Tensor) and each.dtype is torch.int32 and each.numel() == 2
    )
    assert counter.tolist() == [0, 0]  # as the next launch expects it
    return out, lse


def check(
    problem: AttentionShape,
    config: KernelConfig | None = None,
    layout: str = "bhsd",
    qkv: list[torch.Tensor] | None = None,
    programs: int = 2,
    kernel: FlashForwardHopper = KERNEL,
) -> None:
    config, qkv = config or config_of(problem, kernel), qkv or tensors(problem, layout)
    extras = Extras(softcap=1.5 if problem.features.softcap else 0.0)
    out, lse = run(problem, config, qkv, extras, programs, kernel)
    expected = attention_reference(*qkv, causal=problem.causal, features=problem.features, extras=extras)
    compare(out, lse, *expected)


def compare(out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor) -> None:
    assert torch.isfinite(out).all()
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert (out[expected_lse.view(out.shape[:-1]).isneginf()] == 0).all()
    assert (out.float() - expected).norm() <= TOLERANCE * expected.norm()
    seen = ~expected_lse.isneginf()
    assert ((lse - expected_lse)[seen].abs() <= LSE_TOLERANCE).all()


SINKS = {"usual": (0.5, -2.0), "no sink in one head": (float("-inf"), 6.0), "above all scores": (200.0, -0.5)}
"""Of two heads."""


def check_sinks(problem: AttentionShape, sinks: str, kernel: FlashForwardHopper = KERNEL) -> None:
    qkv, extras = tensors(problem), Extras(softcap=1.5 if problem.features.softcap else 0.0)
    given = torch.tensor(SINKS[sinks]).bfloat16()
    found = run(problem, config_of(problem, kernel), qkv, replace(extras, sinks=given), 2, kernel)
    options: dict[str, Any] = {"causal": problem.causal, "features": problem.features, "extras": extras}
    own, own_lse = attention_reference(*qkv, **options, dtype=torch.float64)
    compare(*found, *with_sinks(own, own_lse, given))
    assert (found[0][own_lse.isneginf()] == 0).all()


def check_huge_scores(
    problem: AttentionShape, kernel: FlashForwardHopper = KERNEL, sinks: torch.Tensor | None = None
) -> None:
    q, k, v = tensors(problem)
    q[:, :, ::3] *= 6000.0
    q[:, :, 1::9] = -6000.0
    k = (k.float().abs() * 6000.0).half()
    k[:, :, 1::2] = k[:, :, ::2]
    out, lse = run(problem, config_of(problem, kernel), [q, k, v], Extras(sinks=sinks), 2, kernel)
    scores = q.double() @ k.double().mT * problem.head_dim**-0.5
    if problem.causal is Causal.UPPER_LEFT:
        scores += torch.full(scores.shape[2:], float("-inf")).triu(1)
    expected, expected_lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    if sinks is not None:
        expected, expected_lse = with_sinks(expected, expected_lse, sinks)
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= TOLERANCE * expected.norm()
    summands = (q.double().abs() @ k.double().abs().mT).amax(-1) * problem.head_dim**-0.5  # added up in float32
    assert ((lse - expected_lse).abs() <= 2**-22 * summands + LSE_TOLERANCE).all()


HIDDEN = {"first": slice(0, 70), "last": slice(120, 256), "starts": slice(0, 256, 64), "all": slice(0, 256)}


def check_infinite_keys(problem: AttentionShape, keys: slice, kernel: FlashForwardHopper = KERNEL) -> None:
    """Keys with an infinite element that all queries meet with a positive one count as keys that no query sees."""
    q, k, v = tensors(problem)
    q[..., 0] = q[..., 0].abs() + 0.5
    seen = torch.ones(1, 1, problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
    seen[..., keys] = False
    expected = attention_reference(
        q, k, v, causal=problem.causal, features=Features.parse("boolean"), extras=Extras(mask=seen)
    )
    k[..., keys, 0] = float("-inf")
    compare(*run(problem, config_of(problem, kernel), [q, k, v], Extras(), 2, kernel), *expected)


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("keys", HIDDEN)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_infinite_keys(head_dim: int, keys: str, causal: Causal) -> None:
    """Also where every row sees a key, so that nothing else looks at its first block."""
    check_infinite_keys(shape_of(256, 256, head_dim, num_heads=1, causal=causal), HIDDEN[keys])
    check_infinite_keys(shape_of(200, 256, head_dim, num_heads=1, causal=causal), HIDDEN[keys])


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), EDGES)
def test_lengths_around_the_edges_of_tiles(seqlen_q: int, seqlen_k: int, causal: Causal) -> None:
    check(shape_of(seqlen_q, seqlen_k, num_heads=1, causal=causal))
    check(shape_of(seqlen_q, seqlen_k, 128, num_heads=1, causal=causal))


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 160, 192, 256])
def test_every_head_dimension(head_dim: int, causal: Causal) -> None:
    check(shape_of(100, 170, head_dim, causal=causal), layout="bshd")


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 128), (128, 192), (64, 256), (256, 64), (96, 64), (256, 192), (72, 200)]
)
def test_heads_of_two_dimensions(head_dim: int, head_dim_v: int) -> None:
    check(shape_of(100, 170, head_dim, head_dim_v=head_dim_v, causal=Causal.LOWER_RIGHT), layout="bshd")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (100, 300), (300, 100)])
def test_windows(window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> None:
    features = f"window={window[0]}:{window[1]}"
    check(shape_of(seqlen_q, seqlen_k, features=features, num_heads=1))
    if window[0] >= 0:
        check(shape_of(seqlen_q, seqlen_k, 128, features, num_heads=1, causal=Causal.LOWER_RIGHT))


@pytest.mark.parametrize("features", ["softcap", "softcap window=70:0"])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_soft_cap(features: str, head_dim: int) -> None:
    check(shape_of(100, 200, head_dim, features, causal=Causal.LOWER_RIGHT))


def off_by_its_error(x: torch.Tensor) -> torch.Tensor:
    """tanh as far off as the PTX ISA allows its instruction to be, to either side."""
    return torch.tanh(x) * (1 + 2**-11 * torch.cos(1e5 * x))


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("softcap", [1.5, 30.0, 50.0])
@pytest.mark.parametrize(
    ("query_scale", "tolerance"), [(1.0, PLAIN["bfloat16"].output), (80.0, HARD["bfloat16"].output)]
)
def test_soft_cap_with_the_error_of_its_instruction(
    query_scale: float, tolerance: float, softcap: float, causal: Causal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of usual scores, and of scores next to the cap."""
    monkeypatch.setitem(gluon_machine.STAND_INS, "tanh", off_by_its_error)
    problem, extras = shape_of(256, 256, features="softcap", causal=causal), Extras(softcap=softcap)
    q, k, v = tensors(problem)
    q *= query_scale
    out, lse = run(problem, config_of(problem), [q, k, v], extras, 2)
    right, right_lse = attention_reference(q, k, v, causal=causal, features=problem.features, extras=extras)
    assert (out.float() - right).norm() <= tolerance * right.norm()
    assert ((lse - right_lse).abs() <= 2**-11 * min(softcap, 8 * query_scale) + LSE_TOLERANCE).all()


@pytest.mark.few(6)
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("features", ["", "window=20:9", "softcap"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (300, 100)])
def test_sinks(seqlen_q: int, seqlen_k: int, features: str, sinks: str) -> None:
    """Also of rows that see no key."""
    check_sinks(shape_of(seqlen_q, seqlen_k, 64, features, causal=Causal.LOWER_RIGHT), sinks)
    check_sinks(shape_of(seqlen_q, seqlen_k, 192, features), sinks)


SEQUENCES = [
    ((100, 0, 257, 64), (30, 200, 129, 64)),
    ((64, 64), (0, 128)),
    ((1, 300, 2), (300, 1, 0)),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(("lengths_q", "lengths_k"), SEQUENCES)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(
    ("features", "sunk"),
    [("varlen", False), ("varlen window=70:20", False), ("varlen softcap", False), ("varlen", True)],
)
def test_packed_sequences(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], causal: Causal, features: str, sunk: bool
) -> None:
    """Behind the last sequence there are tokens that nobody may read (NaN) or write."""
    sizes = {"seqlen_q": max(lengths_q), "seqlen_k": max(lengths_k), "batch": len(lengths_q)}
    problem, layout = shape_of(**sizes, features=features, causal=causal), "bhsd" if len(lengths_q) > 2 else "bshd"
    rows, keys = sum(lengths_q), sum(lengths_k)
    q, k, v = tensors(problem, layout, (rows + 3, keys + 3))
    for tensor, length in ((q, rows), (k, keys), (v, keys)):
        tensor[:, :, length:] = float("nan")
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (lengths_q, lengths_k)
    )
    softcap = 1.5 if problem.features.softcap else 0.0
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, softcap=softcap)
    sinks = torch.tensor(SINKS["usual"]) if sunk else None
    out, lse = run(problem, config_of(problem), [q, k, v], replace(extras, sinks=sinks), 2)
    assert (out[:, :, rows:] == 7).all()
    assert (lse[:, rows:] == 7).all()
    parts = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    expected = attention_reference(*parts, causal=causal, features=problem.features, extras=extras)
    if sinks is not None:
        expected = with_sinks(*expected, sinks)
    compare(out[:, :, :rows], lse[:, :rows], *expected)


@pytest.mark.parametrize(
    ("block_m", "block_n", "num_stages", "own"),
    [
        (128, 64, 2, (0, 0, 1)),
        (128, 128, 2, (1, 1, 0)),
        (128, 64, 4, (1, 0, 0)),
        (192, 64, 3, (0, 1, 1)),
        (192, 128, 2, (1, 0, 1)),
        (192, 64, 2, (1, 1, 1)),
        (256, 64, 4, (0, 1, 0)),
        (256, 128, 2, (0, 0, 0)),
        (256, 64, 3, (1, 0, 1)),
        (128, 64, 5, (2, 0, 0)),
        (128, 128, 3, (2, 1, 1)),
        (192, 64, 3, (2, 1, 0)),
        (256, 64, 4, (2, 0, 1)),
    ],
)
def test_parameters(block_m: int, block_n: int, num_stages: int, own: tuple[int, int, int]) -> None:
    """One tile only, one block only, fewer blocks than stages, more programs than tiles."""
    names = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages}
    names |= dict(zip(("split_release", "early_p", "keep_p"), own, strict=True))
    for number, problem in enumerate(
        [
            shape_of(64, 64),
            shape_of(300, 300, causal=Causal.UPPER_LEFT),
            shape_of(130, 420, num_heads=1, causal=Causal.LOWER_RIGHT),
            shape_of(300, 300, num_heads=1, features="window=90:30"),
        ]
    ):
        check(problem, config_of(problem, **names), programs=1 + number)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "own"),
    [
        (64, 64, {"block_m": 128, "block_n": 64, "q_registers": 64}),
        (96, 96, {"q_registers": 64}),
        (128, 128, {"block_n": 64, "num_stages": 4, "split_release": 0, "q_registers": 128}),
        (128, 128, {"block_m": 192, "block_n": 64, "num_stages": 4, "early_p": 1, "q_registers": 64}),
        (192, 128, {"q_registers": 64}),
        (192, 128, {"q_registers": 128}),
        (192, 128, {"block_n": 128, "num_stages": 2, "split_release": 1, "early_p": 1, "q_registers": 192}),
        (192, 192, {"q_registers": 192}),
        (256, 64, {"q_registers": 64}),
        (256, 256, {"q_registers": 64, "early_p": 0}),
        (256, 256, {"early_p": 1, "q_registers": 128, "output_panels": 1}),
        (256, 256, {"q_registers": 0, "output_panels": 1}),
        (256, 256, {"num_stages": 5, "split_release": 2}),
    ],
)
def test_queries_in_registers(head_dim: int, head_dim_v: int, own: dict[str, int]) -> None:
    """A part of them, all of one part of a tile, or all, with the output in every kind of memory."""
    for seqlen_q, seqlen_k, causal in ((200, 200, Causal.UPPER_LEFT), (130, 170, Causal.NONE)):
        problem = shape_of(seqlen_q, seqlen_k, head_dim, head_dim_v=head_dim_v, num_heads=1, causal=causal)
        check(problem, config_of(problem, **own))


@pytest.mark.parametrize("features", ["varlen", "varlen window=70:20"])
def test_panels_of_packed_sequences(features: str) -> None:
    """An output of 256 columns leaves panel by panel, each up to the end of its sequence."""
    problem = shape_of(100, 129, 256, features, batch=3)
    lengths_q, lengths_k = (100, 0, 65), (30, 64, 129)
    rows, keys = sum(lengths_q), sum(lengths_k)
    q, k, v = tensors(problem, "bhsd", (rows + 3, keys + 3))
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (lengths_q, lengths_k)
    )
    extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out, lse = run(problem, config_of(problem, output_panels=1), [q, k, v], extras, 2)
    assert (out[:, :, rows:] == 7).all()
    parts = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    expected = attention_reference(*parts, causal=problem.causal, features=problem.features, extras=extras)
    compare(out[:, :, :rows], lse[:, :rows], *expected)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 2)])
def test_grouped_heads_of_a_batch(heads: tuple[int, int]) -> None:
    sizes = {"batch": 2, "num_heads": heads[0], "num_heads_kv": heads[1]}
    check(shape_of(150, 150, **sizes, causal=Causal.UPPER_LEFT), layout="bshd", programs=3)


def test_strided_tensors() -> None:
    """Slices of a fused projection, and heads that begin in the middle of a row."""
    problem = shape_of(100, 100, num_heads=2, num_heads_kv=2)
    fused = torch.randn(1, 100, 3, 2, 64).half()
    check(problem, qkv=[fused[:, :, part].transpose(1, 2) for part in range(3)])


def test_scores_that_grow_and_values_that_nobody_may_see() -> None:
    """The running maximum is raised in every block; NaN behind the diagonal and beyond the window of no query."""
    problem = shape_of(200, 300, causal=Causal.UPPER_LEFT)
    q, k, v = tensors(problem)
    k = (k.float() * torch.linspace(16, 0.1, 300)[:, None]).half()
    k[:, :, 200:], v[:, :, 256:] = float("nan"), float("nan")
    out, lse = run(problem, config_of(problem), [q, k, v], Extras(), 2)
    compare(out, lse, *attention_reference(q, k[:, :, :200], v[:, :, :200], causal=Causal.UPPER_LEFT))


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
def test_scores_of_any_size(causal: Causal) -> None:
    """Next to rows of usual scores some of 2^31: positive in any block, or negative in all, with pairs of equal keys.

    The maxima of such rows are rounded by more than any exponent holds.
    """
    check_huge_scores(shape_of(200, 300, causal=causal))
    check_huge_scores(shape_of(200, 300, causal=causal), sinks=torch.tensor(SINKS["usual"]))


# ---- the machine itself


@gluon.jit
def hasty_kernel(counter, PARITY: gl.constexpr, COUNT: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier.index(0), count=COUNT)
    mbarrier.arrive(barrier.index(0), count=1)
    mbarrier.arrive(barrier.index(0), count=1)
    mbarrier.wait(barrier.index(0), PARITY)


def test_the_machine_notices_what_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_machine, "PATIENCE", 0.1)
    counter = torch.zeros(1, dtype=torch.int32)
    gluon_machine.run(hasty_kernel, (counter, 0, 2), 1)
    for parity, count in ((1, 2), (0, 1), (0, 3)):  # completed once, twice, never
        with pytest.raises(TimeoutError, match="would hang"):
            gluon_machine.run(hasty_kernel, (counter, parity, count), 1)


def read_now(pending: int, deps: Any) -> Any:
    """A wait that waits for nothing."""
    values = tuple(getattr(dep, "value", dep) for dep in deps)
    assert all(value is not None for value in values), "a result is used before it is waited for"
    return values[0] if len(values) == 1 else values


WRONG: dict[str, Any] = {
    "warpgroup_mma_wait": read_now,
    "release": lambda *arguments: None,  # the last slot of a tile is never given back
    "hand_back": lambda count, memory, slot, phase, *constants: (slot, phase),
    "pin": lambda x: x * 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_machine_notices_wrong_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gluon_machine.STAND_INS, name, WRONG[name])
    monkeypatch.setattr(gluon_machine, "PATIENCE", 0.2)
    with pytest.raises((AssertionError, TimeoutError)):
        check(shape_of(400, 400, batch=2, causal=Causal.UPPER_LEFT), programs=1)
