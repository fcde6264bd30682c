"""Results of the Hopper forward on a GPU: lengths, masks, head dimensions, features, memory, streams, graphs.

A kernel that hangs blocks its process for good: the timeouts kill it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocktune.kernels.base.launch import ExtrasLaunch, TritonLaunch
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.forward.kernel import FlashForwardHopper
from blocktune.kernels.portable.sinks.results import with_sinks
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.dispatch.launches.results import empty_output
from tests.support.hopper_gpu import skip_elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
HOPPER = limits_for((9, 0))
KERNEL = FlashForwardHopper()
# Relative Frobenius error: a probability carries half a unit in the last place into the second product, and the output
# is rounded once more.
TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3}
LSE_TOLERANCE = 2e-3
HEAD_DIMS = (40, 64, 80, 96, 128, 160, 192, 256)
EDGES = (1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)
WINDOWS = ((0, 0), (20, 9), (-1, 3), (64, -1), (63, 0), (128, 100), (1000, 1000))
Tensors = Sequence[torch.Tensor]


@pytest.fixture(autouse=True)
def _hopper_alone() -> None:
    skip_elsewhere(KERNEL)


def shape_of(
    seqlen_q: int = 2000, seqlen_k: int = 2000, head_dim: int = 64, features: str = "", **changes: Any
) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim_v": head_dim}
    sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim} | changes
    return AttentionShape(**sizes, features=Features.parse(features))


def tensors(problem: AttentionShape, layout: str = "bhsd", tokens: tuple[int, int] | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    batch, (rows, keys) = problem.batch if tokens is None else 1, tokens or (problem.seqlen_q, problem.seqlen_k)
    dtype = getattr(torch, problem.dtype)

    def draw(heads: int, length: int, dim: int) -> torch.Tensor:
        sizes = (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)
        drawn = torch.randn(sizes, device="cuda").to(dtype)
        return drawn if layout == "bhsd" else drawn.transpose(1, 2)

    heads = (problem.num_heads, problem.num_heads_kv, problem.num_heads_kv)
    dims = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    return [draw(*sizes) for sizes in zip(heads, (rows, keys, keys), dims, strict=True)]


def results(problem: AttentionShape, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for output, laid out like the query, and log-sum-exp, 7 where nothing is written."""
    out = empty_output(q, problem.head_dim_v).fill_(7.0)
    sizes = q.shape[1:3] if problem.features.varlen else q.shape[:3]
    return out, torch.full(sizes, 7.0, device="cuda")


def run(
    problem: AttentionShape,
    qkv: Tensors,
    extras: Extras | None = None,
    config: KernelConfig | None = None,
    kernel: FlashForwardHopper = KERNEL,
) -> tuple[torch.Tensor, torch.Tensor]:
    config = config or kernel.default_config(problem, HOPPER)
    assert kernel.violations(config, problem, HOPPER) == ()
    assert kernel.layout_problem(*qkv) is None
    out, lse = results(problem, qkv[0])
    sunk = extras is not None and extras.sinks is not None
    launch: Any = (kernel.bind_with_sinks if sunk else kernel.bind)(config, problem)
    launch(*qkv, out, lse, problem.head_dim**-0.5, *((extras,) if problem.features or sunk else ()))
    return out, lse


def compare(problem: AttentionShape, found: Tensors, expected: Tensors) -> None:
    (out, lse), (right, right_lse) = found, expected
    assert torch.isfinite(out).all()
    assert torch.equal(lse.isneginf(), right_lse.isneginf())
    assert (out[right_lse.view(out.shape[:-1]).isneginf()] == 0).all()
    assert (out.double() - right).norm() <= TOLERANCE[problem.dtype] * right.norm()
    seen = ~right_lse.isneginf()
    assert ((lse.double() - right_lse)[seen].abs() <= LSE_TOLERANCE).all()


def check(
    problem: AttentionShape,
    layout: str = "bhsd",
    qkv: Tensors | None = None,
    config: KernelConfig | None = None,
    kernel: FlashForwardHopper = KERNEL,
) -> None:
    """Twice the same, to the bit, and right."""
    qkv = qkv or tensors(problem, layout)
    extras = Extras(softcap=1.5 if problem.features.softcap else 0.0)
    found, again = (run(problem, qkv, extras, config, kernel) for _ in range(2))
    options: dict[str, Any] = {"features": problem.features, "extras": extras}
    compare(problem, found, attention_reference(*qkv, causal=problem.causal, dtype=torch.float64, **options))
    assert torch.equal(found[0], again[0])
    assert torch.equal(found[1], again[1])


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_around_the_edges_of_tiles(head_dim: int, causal: Causal) -> None:
    for number, (seqlen_q, seqlen_k) in enumerate(itertools.product(EDGES, EDGES)):
        if number % 4 == 0 or seqlen_q == seqlen_k:
            check(shape_of(seqlen_q, seqlen_k, head_dim, causal=causal), ("bhsd", "bshd")[number % 2])


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((head_dim, "bfloat16") for head_dim in HEAD_DIMS), (96, "float16"), (128, "float16")]
)
def test_every_head_dimension(head_dim: int, dtype: str, causal: Causal) -> None:
    for seqlen_q, seqlen_k in ((1024, 1024), (1000, 1100), (2100, 700)):
        check(shape_of(seqlen_q, seqlen_k, head_dim, causal=causal, dtype=dtype), "bshd")


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 128), (128, 192), (64, 256), (256, 64), (96, 64), (256, 192), (128, 64)]
)
def test_heads_of_two_dimensions(head_dim: int, head_dim_v: int) -> None:
    for causal in Causal:
        check(shape_of(1000, 1500, head_dim, head_dim_v=head_dim_v, causal=causal))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2000, 2000), (300, 1300), (1300, 300)])
def test_windows(seqlen_q: int, seqlen_k: int, head_dim: int) -> None:
    for window, causal in itertools.product(WINDOWS, Causal):
        if window[0] >= 0 or causal is Causal.NONE:
            features = f"window={window[0]}:{window[1]}"
            check(shape_of(seqlen_q, seqlen_k, head_dim, features, causal=causal))


@pytest.mark.parametrize("features", ["softcap", "softcap window=200:0"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_soft_cap(features: str, head_dim: int) -> None:
    for causal in Causal:
        check(shape_of(1000, 1300, head_dim, features, causal=causal))


@pytest.mark.parametrize("features", ["", "window=200:0", "softcap"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_sinks(features: str, head_dim: int) -> None:
    """One of four heads has no sink, and the sink of another outweighs all its keys. Some rows see no keys."""
    sinks = torch.tensor([0.5, 4.0, float("-inf"), 200.0], device="cuda").bfloat16()
    for causal, rows in itertools.product(Causal, (1000, 1500)):
        problem = shape_of(rows, 1300, head_dim, features, causal=causal)
        qkv, extras = tensors(problem), Extras(softcap=1.5 if problem.features.softcap else 0.0)
        options: dict[str, Any] = {"causal": problem.causal, "features": problem.features, "extras": extras}
        right = with_sinks(*attention_reference(*qkv, **options, dtype=torch.float64), sinks)
        compare(problem, run(problem, qkv, replace(extras, sinks=sinks)), right)


SEQUENCES = [
    ((100, 0, 257, 2000, 64, 1), (30, 200, 129, 1999, 64, 0)),
    ((64, 64, 1500), (0, 128, 1500)),
    ((1, 300, 2), (300, 1, 1000)),
]


@pytest.mark.parametrize("features", ["varlen", "varlen window=170:20", "varlen softcap window=64:0"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_packed_sequences(head_dim: int, features: str) -> None:
    """Behind the last sequence there are tokens that nobody may read (NaN) or write."""
    for (lengths_q, lengths_k), causal, layout in itertools.product(SEQUENCES, Causal, ("bshd", "bhsd")):
        lengths = max(lengths_q), max(lengths_k)
        problem = shape_of(*lengths, head_dim, features, batch=len(lengths_q), causal=causal)
        rows, keys = sum(lengths_q), sum(lengths_k)
        q, k, v = tensors(problem, layout, (rows + 3, keys + 3))
        for tensor, length in ((q, rows), (k, keys), (v, keys)):
            tensor[:, :, length:] = float("nan")
        bounds = ([0, *itertools.accumulate(lengths)] for lengths in (lengths_q, lengths_k))
        cu_q, cu_k = (torch.tensor(bound, dtype=torch.int32, device="cuda") for bound in bounds)
        softcap = 1.5 if problem.features.softcap else 0.0
        extras = Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, softcap=softcap)
        out, lse = run(problem, (q, k, v), extras)
        assert (out[:, :, rows:] == 7).all()
        assert (lse[:, rows:] == 7).all()
        parts = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
        options: dict[str, Any] = {"features": problem.features, "extras": extras}
        expected = attention_reference(*parts, causal=problem.causal, dtype=torch.float64, **options)
        compare(problem, (out[:, :, :rows], lse[:, :rows]), expected)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    for causal, layout in itertools.product(Causal, ("bhsd", "bshd")):
        problem = shape_of(777, 1500, 128, num_heads=heads[0], num_heads_kv=heads[1], causal=causal, batch=3)
        check(problem, layout)


def test_strided_tensors() -> None:
    """A fused projection, padded rows, a part of a longer cache."""
    problem = shape_of(1000, 1000, 128, num_heads=4, num_heads_kv=4, causal=Causal.UPPER_LEFT)
    fused = torch.randn(2, 1000, 3, 4, 128, device="cuda").bfloat16()
    check(problem, qkv=[fused[:, :, part].transpose(1, 2) for part in range(3)])
    padded = torch.randn(3, 2, 4, 1100, 136, device="cuda").bfloat16()
    check(problem, qkv=list(padded[:, :, :, 50:1050, :128]))


@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize(("block_m", "block_n"), list(itertools.product((128, 192, 256), (64, 128))))
def test_every_block(block_m: int, block_n: int, split: int) -> None:
    """Four stages with common releases, two with separate ones, three of one tile each."""
    problems = [
        shape_of(1000, 1000, causal=Causal.UPPER_LEFT),
        shape_of(130, 420, causal=Causal.LOWER_RIGHT),
        shape_of(900, 900, features="window=90:30"),
        shape_of(64, 64),
    ]
    names = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": (4, 2, 3)[split]}
    for number, problem in enumerate(problems):
        own = {"split_release": split, "early_p": number % 2, "keep_p": number // 2}
        own |= {"q_registers": 64 if block_m == 128 and number % 2 else 0, "output_panels": 0}
        config = KernelConfig.of(KERNEL.name, names | own)
        if not KERNEL.violations(config, problem, HOPPER):  # four stages of 128 keys beside 256 rows have no room
            check(problem, config=config)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "own"),
    [
        (64, 64, (128, 128, 3, 0, 0, 64, 0)),
        (96, 96, (128, 128, 3, 0, 1, 64, 0)),
        (128, 128, (128, 64, 4, 0, 0, 128, 0)),
        (128, 128, (192, 64, 3, 0, 1, 64, 0)),
        (128, 128, (128, 128, 2, 1, 1, 128, 0)),
        (192, 128, (128, 64, 3, 0, 0, 192, 0)),
        (192, 128, (128, 128, 2, 1, 1, 128, 0)),
        (192, 192, (128, 64, 3, 0, 0, 192, 0)),
        (256, 256, (128, 64, 2, 1, 1, 128, 1)),
        (256, 256, (128, 64, 2, 1, 0, 64, 0)),
        (256, 256, (128, 64, 5, 2, 0, 0, 0)),
        (256, 256, (128, 64, 5, 2, 1, 128, 0)),
        (256, 256, (128, 64, 4, 2, 1, 128, 1)),
        (128, 128, (128, 64, 5, 2, 0, 128, 0)),
    ],
)
def test_queries_in_registers(head_dim: int, head_dim_v: int, own: tuple[int, ...]) -> None:
    names = ("block_m", "block_n", "num_stages", "split_release", "early_p", "q_registers", "output_panels")
    config = KernelConfig.of(KERNEL.name, dict(zip(names, own, strict=True)) | {"num_warps": 4, "keep_p": 0})
    for seqlen_q, seqlen_k, causal in itertools.product((1000, 2048), (1024, 1500), Causal):
        check(shape_of(seqlen_q, seqlen_k, head_dim, head_dim_v=head_dim_v, causal=causal), config=config)


def test_a_long_sequence_of_many_tiles() -> None:
    """Growing scores: the running maximum is raised again and again."""
    for head_dim, causal in itertools.product((64, 96, 128, 192, 256), (Causal.NONE, Causal.LOWER_RIGHT)):
        problem = shape_of(4001, 4003, head_dim, causal=causal, batch=1)
        q, k, v = tensors(problem)
        check(problem, qkv=(q, (k.float() * torch.linspace(16, 0.1, 4003, device="cuda")[:, None]).bfloat16(), v))


CONCURRENT = [
    shape_of(1000, 1500, 128, causal=Causal.LOWER_RIGHT),
    shape_of(1500, 1500, 64, "window=200:0 softcap"),
    shape_of(999, 999, 256),
]


@pytest.mark.parametrize("problem", CONCURRENT, ids=lambda problem: problem.label)
def test_two_streams_do_not_take_each_other_s_tiles(problem: AttentionShape) -> None:
    qkv, extras, found = tensors(problem), Extras(softcap=1.5 if problem.features.softcap else 0.0), []
    expected, _ = run(problem, qkv, extras)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for stream in streams * 8:  # in turns, so that launches of both are in flight together
        with torch.cuda.stream(stream):
            found.append(run(problem, qkv, extras)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.parametrize("problem", CONCURRENT, ids=lambda problem: problem.label)
def test_a_graph_replays_beside_launches_of_another_stream(problem: AttentionShape) -> None:
    qkv, extras = tensors(problem), Extras(softcap=1.5 if problem.features.softcap else 0.0)
    run(problem, qkv, extras)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, twice = run(problem, qkv, extras), run(problem, qkv, extras)
    for tensor in qkv:
        tensor.normal_()
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    for _ in range(3):
        graph.replay()
        with torch.cuda.stream(other):
            beside = run(problem, qkv, extras)
    torch.cuda.synchronize()
    options: dict[str, Any] = {"features": problem.features, "extras": extras}
    compare(problem, captured, attention_reference(*qkv, causal=problem.causal, dtype=torch.float64, **options))
    assert torch.equal(twice[0], captured[0])
    assert torch.equal(beside[0], captured[0])


@pytest.mark.parametrize("features", ["", "window=200:0 softcap"])
def test_the_short_launch_gives_the_same(features: str) -> None:
    """Also for other tensors at other addresses, and for another soft cap."""
    problem = shape_of(1000, 1300, 128, features, causal=Causal.LOWER_RIGHT)
    launch = KERNEL.bind(KERNEL.default_config(problem, HOPPER), problem)
    assert isinstance(launch, TritonLaunch)
    assert isinstance(launch, ExtrasLaunch) == bool(features)
    qkv, scale = tensors(problem), problem.head_dim**-0.5
    short: Any = launch.pinned(*qkv, *results(problem, qkv[0]), scale, *((Extras(softcap=1.0),) if features else ()))
    for softcap in (1.5, 30.0):
        qkv = [tensor + 1 for tensor in qkv]
        extras = Extras(softcap=softcap if features else 0.0)
        out, lse = results(problem, qkv[0])
        short(*qkv, out, lse, scale, *((extras,) if features else ()))
        expected = run(problem, qkv, extras)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_packed_sequences_are_computed_like_single_ones() -> None:
    problem = shape_of(500, 700, 128, "varlen", batch=1, causal=Causal.LOWER_RIGHT)
    q, k, v = tensors(problem, "bshd", (500, 700))
    cu_q, cu_k = (torch.tensor([0, length], dtype=torch.int32, device="cuda") for length in (500, 700))
    out, lse = run(problem, (q, k, v), Extras(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))
    dense = replace(problem, features=Features())
    expected, expected_lse = run(dense, (q, k, v), config=KERNEL.default_config(problem, HOPPER))
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse[0])
