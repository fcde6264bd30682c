"""Results of the 8-bit Hopper forward on a GPU, against float64 over the same numbers.

A kernel that hangs blocks its process for good: the timeouts kill it.
"""

import itertools
from typing import Any

import pytest
import torch

from blocktune import attention_fp8
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.hopper.fp8.kernel import FlashForwardFp8
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import FP8, AttentionShape, Causal
from blocktune.runtime.dispatch.dispatcher import attention
from blocktune.runtime.dispatch.launches.results import empty_output
from tests.support.hopper_gpu import skip_elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
HOPPER = limits_for((9, 0))
KERNEL = FlashForwardFp8()
TOLERANCE = 5e-2
"""Relative Frobenius error: 2.6e-2 by rounded probabilities, and sums of about 14 bits."""
LSE_TOLERANCE = 1e-2
"""And a rounding of each instruction of a score: see `lse_tolerance`."""
EDGES = (1, 17, 63, 64, 65, 127, 128, 129, 191, 193, 256, 257, 300)


@pytest.fixture(autouse=True)
def _hopper_alone() -> None:
    skip_elsewhere(KERNEL)


def shape_of(seqlen_q: int = 2000, seqlen_k: int = 2000, head_dim: int = 64, **changes: Any) -> AttentionShape:
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim_v": head_dim, "dtype": FP8}
    return AttentionShape(**sizes | {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim} | changes)


def tensors(problem: AttentionShape, layout: str = "bhsd") -> list[torch.Tensor]:
    torch.manual_seed(0)

    def draw(heads: int, length: int, dim: int) -> torch.Tensor:
        sizes = (problem.batch, heads, length, dim) if layout == "bhsd" else (problem.batch, length, heads, dim)
        drawn = torch.randn(sizes, device="cuda").to(torch.float8_e4m3fn)
        return drawn if layout == "bhsd" else drawn.transpose(1, 2)

    return [
        draw(problem.num_heads, problem.seqlen_q, problem.head_dim),
        draw(problem.num_heads_kv, problem.seqlen_k, problem.head_dim),
        draw(problem.num_heads_kv, problem.seqlen_k, problem.head_dim_v),
    ]


def run(
    problem: AttentionShape,
    qkv: list[torch.Tensor],
    extras: Extras = NO_EXTRAS,
    config: KernelConfig | None = None,
    *,
    wants_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp; without it the tensor cores add probabilities up, with it threads."""
    config = config or KERNEL.default_config(problem, HOPPER)
    assert KERNEL.violations(config, problem, HOPPER) == ()
    assert KERNEL.layout_problem(*qkv) is None
    out = empty_output(qkv[0], problem.head_dim_v).fill_(7.0)
    lse = torch.full(qkv[0].shape[:3], 7.0, device="cuda")
    KERNEL.bind(config, problem)(*qkv, out, lse if wants_lse else None, problem.head_dim**-0.5, extras)
    return out, lse


def expected_of(
    problem: AttentionShape, qkv: list[torch.Tensor], extras: Extras = NO_EXTRAS
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (extras.scale_q, extras.scale_k, extras.scale_v)
    numbers = (
        tensor.double() if scale is None else tensor.double() * scale[..., None, None]
        for tensor, scale in zip(qkv, scales, strict=True)
    )
    return attention_reference(*numbers, causal=problem.causal, dtype=torch.float64)


def lse_tolerance(right: torch.Tensor, head_dim: int) -> float:
    """A score is summed by head_dim / 32 instructions, each of which cuts off all places below 2^-13 of the largest
    number in the sum, which for any row may be as large as the largest score."""
    return LSE_TOLERANCE + head_dim / 32 * 2**-13 * right.abs().max().item()


def config_of(problem: AttentionShape, **own: int) -> KernelConfig:
    return KernelConfig.of(KERNEL.name, dict(KERNEL.default_config(problem, HOPPER).parameters) | own)


def check(problem: AttentionShape, layout: str = "bhsd", extras: Extras = NO_EXTRAS, **own: Any) -> None:
    """Twice the same, to the bit, and right."""
    qkv = own.pop("qkv", None) or tensors(problem, layout)
    right, right_lse = expected_of(problem, qkv, extras)
    dead = right_lse.isneginf()
    for wants_lse in (False, True):
        found, again = (run(problem, qkv, extras, wants_lse=wants_lse, **own) for _ in range(2))
        out, lse = found
        assert torch.isfinite(out).all()
        assert (out[dead] == 0).all()
        assert (out.double() - right).norm() <= TOLERANCE * right.norm()
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
    assert torch.equal(lse.isneginf(), dead)
    assert (lse.double() - right_lse)[~dead].abs().max() <= lse_tolerance(right_lse[~dead], problem.head_dim)


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_around_the_edges_of_tiles(head_dim: int, causal: Causal) -> None:
    for number, (seqlen_q, seqlen_k) in enumerate(itertools.product(EDGES, EDGES)):
        if number % 4 == 0 or seqlen_q == seqlen_k:
            check(shape_of(seqlen_q, seqlen_k, head_dim, causal=causal), ("bhsd", "bshd")[number % 2])


@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (256, 128), (192, 128), (64, 128), (256, 256), (160, 240)],
)
def test_every_head_dimension(head_dim: int, head_dim_v: int, causal: Causal) -> None:
    for (seqlen_q, seqlen_k), turn_values in itertools.product(((1024, 1024), (1000, 1100), (2100, 700)), (0, 1)):
        problem = shape_of(seqlen_q, seqlen_k, head_dim, head_dim_v=head_dim_v, causal=causal)
        check(problem, "bshd", config=config_of(problem, turn_values=turn_values))


@pytest.mark.parametrize("turn_values", [0, 1])
@pytest.mark.parametrize("q_registers", [0, 1])
@pytest.mark.parametrize(("block_m", "block_n"), list(itertools.product((128, 192, 256), (64, 128))))
def test_every_block(block_m: int, block_n: int, q_registers: int, turn_values: int) -> None:
    problems = [
        shape_of(1000, 1000, causal=Causal.UPPER_LEFT),
        shape_of(130, 420, causal=Causal.LOWER_RIGHT),
        shape_of(900, 900),
        shape_of(64, 64),
    ]
    for stages in (2, 3, 4, 6):
        names = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": stages}
        names |= {"q_registers": q_registers, "turn_values": turn_values}
        config = KernelConfig.of(KERNEL.name, names)
        for problem in problems:
            check(problem, config=config)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)])
def test_grouped_heads_with_scales(heads: tuple[int, int]) -> None:
    torch.manual_seed(1)
    scale_q, scale_k = (torch.rand(3, count, device="cuda") + 0.5 for count in heads)
    for causal, layout in itertools.product(Causal, ("bhsd", "bshd")):
        problem = shape_of(777, 1500, 128, num_heads=heads[0], num_heads_kv=heads[1], causal=causal, batch=3)
        check(problem, layout, Extras(scale_q=scale_q, scale_k=scale_k[:1], scale_v=scale_k[:, :1]))


def test_a_long_sequence_of_many_tiles() -> None:
    """Growing scores: the running maximum is raised again and again."""
    for head_dim, causal in itertools.product((64, 128, 256), (Causal.NONE, Causal.LOWER_RIGHT)):
        problem = shape_of(4001, 4003, head_dim, causal=causal, batch=1)
        q, k, v = tensors(problem)
        grown = k.float() * torch.linspace(16, 0.1, 4003, device="cuda")[:, None]
        check(problem, qkv=[q, grown.to(torch.float8_e4m3fn), v])


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.UPPER_LEFT])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_of_one_sign_keep_their_size(head_dim: int, causal: Causal, block_n: int) -> None:
    """An accumulator of 8-bit products alone would make this output a quarter smaller."""
    problem = shape_of(16384, 16384, head_dim, batch=1, num_heads=2, num_heads_kv=1, causal=causal)
    q, k, v = tensors(problem)
    v = (v.float().abs() + 0.5).to(v.dtype)
    own = {"block_n": block_n} | ({"num_stages": 2, "q_registers": 0} if head_dim == 256 else {})
    config = config_of(problem, **own)
    out = run(problem, [q, k, v], config=config)[0].double()
    right, _ = expected_of(problem, [q, k, v])
    assert (out - right).norm() <= 2e-2 * right.norm()
    for rows in (slice(0, 2048), slice(-2048, None)):
        found, wanted = out[:, :, rows], right[:, :, rows]
        assert abs((found * wanted).sum() / wanted.square().sum() - 1) <= 2e-2


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_accumulator_keeps_the_size_of_1024_keys(head_dim: int) -> None:
    """The longest sequence without sums of stretches, of values with one sign."""
    problem = shape_of(1024, 1024, head_dim)
    q, k, v = tensors(problem)
    v = (v.float().abs() + 0.5).to(v.dtype)
    out = run(problem, [q, k, v])[0].double()
    right, _ = expected_of(problem, [q, k, v])
    assert abs((out * right).sum() / right.square().sum() - 1) <= 2e-2


def test_the_pass_writes_the_values_in_the_order_of_the_registers() -> None:
    """Bit for bit; of rows that only 4 divides as well, and zeros behind the last key."""
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15], device="cuda")
    for head_dim, row, length in ((64, 64, 128), (128, 128, 1000), (80, 84, 300), (96, 96, 1)):
        problem = shape_of(64, length, head_dim)
        v = torch.randn(2, 2, length, row, device="cuda").to(torch.float8_e4m3fn)[..., :head_dim]
        bound = KERNEL.bind(config_of(problem, turn_values=0), problem)
        found = bound.memory(v)
        bound._turn(v, found)
        whole = torch.zeros(2, 2, found.shape[3], head_dim, dtype=torch.uint8, device="cuda")
        whole[:, :, :length] = v.view(torch.uint8)
        ordered = whole.unflatten(2, (-1, 16))[:, :, :, order].flatten(2, 3)
        assert torch.equal(found.view(torch.uint8), ordered.transpose(2, 3))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_far_below_zero(head_dim: int) -> None:
    """Integers do not order them: the maximum is that of the numbers."""
    for causal in Causal:
        problem = shape_of(1000, 1100, head_dim, causal=causal)
        q, k, v = tensors(problem)
        low = [(tensor.float().abs() * factor).to(tensor.dtype) for tensor, factor in ((q, 1), (k, -1))]
        check(problem, qkv=[*low, v])


@pytest.mark.parametrize("length", [1000, 3000])
def test_two_streams_and_a_graph_do_not_meet(length: int) -> None:
    """The transposed values of a launch belong to it alone; with the longer queries a pass writes them."""
    problem = shape_of(length, 1500, 128, causal=Causal.LOWER_RIGHT)
    first, second = tensors(problem), [tensor.flip(2).contiguous() for tensor in tensors(problem)]
    expected = [run(problem, qkv)[0] for qkv in (first, second)]
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for number in range(16):
        with torch.cuda.stream(streams[number % 2]):
            found.append(run(problem, (first, second)[number % 2])[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[number % 2]) for number, out in enumerate(found))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(problem, first)[0]
    for tensor, other in zip(first, second, strict=True):
        tensor.copy_(other)
    graph.replay()
    beside = run(problem, second)[0]
    torch.cuda.synchronize()
    assert torch.equal(captured, expected[1])
    assert torch.equal(beside, expected[1])


@pytest.mark.parametrize("length", [1000, 3000])
def test_the_short_launch_gives_the_same(length: int) -> None:
    """Also for other tensors at other addresses, and for other scales; with the longer queries of two kernels."""
    problem = shape_of(length, 1300, 128, causal=Causal.LOWER_RIGHT)
    launch, scale = KERNEL.bind(KERNEL.default_config(problem, HOPPER), problem), problem.head_dim**-0.5
    for extras in (NO_EXTRAS, Extras(scale_q=torch.full((1, 1), 2.0, device="cuda"))):
        qkv = tensors(problem)
        out, lse = run(problem, qkv, extras, wants_lse=True)
        short = launch.pinned(*qkv, torch.empty_like(out), torch.empty_like(lse), scale, extras)
        for _ in range(2):
            qkv = [tensor.clone() for tensor in qkv]
            found, found_lse = torch.zeros_like(out), torch.zeros_like(lse)
            short(*qkv, found, found_lse, scale, extras)
            assert torch.equal(found, out)
            assert torch.equal(found_lse, lse)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_entry_point_takes_the_kernel(is_causal: bool) -> None:
    attention.reload()
    problem = shape_of(1024, 1024, 128, causal=Causal.UPPER_LEFT if is_causal else Causal.NONE)
    q, k, v = tensors(problem)
    scales = {"scale_q": torch.tensor(0.5, device="cuda"), "scale_v": torch.rand(2, device="cuda") + 0.5}
    found = attention_fp8(q, k, v, is_causal=is_causal, **scales)
    extras = Extras(scale_q=scales["scale_q"].view(1, 1), scale_v=scales["scale_v"][None])
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, run(problem, [q, k, v], extras)[0])
    plain = attention_fp8(q, k, v, is_causal=is_causal)
    assert torch.equal(plain, run(problem, [q, k, v])[0])
