"""Gradients of the Hopper backward's whole tiles on a GPU, its streams and its graphs."""

from itertools import product

import pytest
import torch

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import AttentionShape, Causal
from tests.kernels.hopper.backward.test_flash_bwd_hopper import HOPPER, KERNEL, MASKS, config, shape
from tests.support.hopper_gpu import skip_elsewhere

# Relative Frobenius error of each gradient: probabilities and dS carry half a unit in the last place into the products.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}


class Problem:
    """Tensors of a shape, the forward's results, and the gradients by autograd of the reference in float32."""

    def __init__(self, asked: AttentionShape, layout: str = "bhsd", growth: float = 1.0, scale: float | None = None):
        torch.manual_seed(asked.seqlen_q + asked.head_dim)
        self.shape, self.scale = asked, asked.head_dim**-0.5 if scale is None else scale
        queries, keys = (asked.num_heads, asked.seqlen_q), (asked.num_heads_kv, asked.seqlen_k)
        self.q, self.k, self.v, self.dout = (
            self._draw(*sizes, layout, factor)
            for sizes, factor in ((queries, growth), (keys, 1.0), (keys, 1.0), (queries, 1.0))
        )
        leaves = [tensor.float().requires_grad_() for tensor in (self.q, self.k, self.v)]
        out, lse = attention_reference(*leaves, causal=asked.causal, scale=self.scale)
        self.out, self.lse = out.detach().to(self.q.dtype), lse.detach().contiguous()
        self.expected = torch.autograd.grad(out, leaves, self.dout.float())

    def _draw(self, heads: int, length: int, layout: str, factor: float) -> torch.Tensor:
        made = torch.randn(self.shape.batch, heads, length, self.shape.head_dim, device="cuda") * factor
        made = made.to(getattr(torch, self.shape.dtype))
        return made if layout == "bhsd" else made.transpose(1, 2).contiguous().transpose(1, 2)

    def run(self, asked: KernelConfig) -> list[torch.Tensor]:
        """dq, dk and dv, poisoned before."""
        found = [torch.full_like(tensor, float("nan")) for tensor in (self.q, self.k, self.v)]
        KERNEL.bind(asked, self.shape)(self.q, self.k, self.v, self.out, self.lse, self.dout, *found, self.scale)
        return found

    def assert_right(self, found: list[torch.Tensor]) -> None:
        for name, got, expected in zip(("dq", "dk", "dv"), found, self.expected, strict=True):
            assert torch.isfinite(got).all(), name
            errors = (got.float() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))  # of every head
            assert errors.max() <= TOLERANCE[self.shape.dtype], (name, errors.max().item())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("growth", [1.0, 6.0])
@pytest.mark.parametrize("seqlen", [128, 384, 1152, 2048])
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_are_right_and_keys_repeat_themselves(
    dtype: str, head_dim: int, causal: Causal, seqlen: int, growth: float
) -> None:
    skip_elsewhere(KERNEL)
    problem = Problem(shape(head_dim, seqlen, causal, dtype=dtype, num_heads=5, num_heads_kv=5), growth=growth)
    best = KERNEL.default_config(problem.shape, HOPPER)
    first = problem.run(best)
    problem.assert_right(first)
    for _ in range(2):
        again = problem.run(best)
        problem.assert_right(again)
        assert torch.equal(again[1], first[1])
        assert torch.equal(again[2], first[2])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_grouped_heads(head_dim: int, causal: Causal, layout: str) -> None:
    skip_elsewhere(KERNEL)
    for heads, heads_kv, seqlen in ((8, 2, 128), (6, 2, 640), (7, 1, 1152), (16, 8, 2048)):
        asked = shape(head_dim, seqlen, causal, num_heads=heads, num_heads_kv=heads_kv)
        problem = Problem(asked, layout)
        problem.assert_right(problem.run(KERNEL.default_config(asked, HOPPER)))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_groups_in_parts(head_dim: int, causal: Causal) -> None:
    """Gradients of keys and values are added up in the same order every time."""
    skip_elsewhere(KERNEL)
    for layout, seqlen, parts in product(("bhsd", "bshd"), (128, 1152), (1, 2, 8)):
        asked = shape(head_dim, seqlen, causal, num_heads=16, num_heads_kv=2)
        problem = Problem(asked, layout)
        first, again = (problem.run(config(asked, group_parts=parts)) for _ in range(2))
        problem.assert_right(first)
        assert torch.equal(again[1], first[1])
        assert torch.equal(again[2], first[2])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(128, 640), (1024, 256)])
def test_lengths_that_differ_and_another_scale(head_dim: int, seqlen_q: int, seqlen_k: int) -> None:
    skip_elsewhere(KERNEL)
    asked = shape(head_dim, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=3, num_heads=5, num_heads_kv=5)
    for layout, scale in (("bhsd", 0.2), ("bshd", 0.01), ("bhsd", -0.1)):
        problem = Problem(asked, layout, scale=scale)
        problem.assert_right(problem.run(KERNEL.default_config(asked, HOPPER)))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_switch_is_right(head_dim: int, causal: Causal) -> None:
    """With fewer steps than stages, and with more tiles than multiprocessors."""
    skip_elsewhere(KERNEL)
    problems = [Problem(shape(head_dim, seqlen, causal, num_heads_kv=2)) for seqlen in (128, 4352)]
    for number, (named, persistent) in enumerate(product((0, 1, 2, 3), (0, 1))):
        stages = 2 + number % (3 if head_dim == 64 else 2)
        changes = {"num_stages": stages, "fold_lse": number // 2 % 2, "fold_delta": number // 4 % 2}
        asked = config(problems[0].shape, named_barriers=named, persistent=persistent, **changes)
        for problem in problems:
            assert KERNEL.violations(asked, problem.shape, HOPPER) == ()
            problem.assert_right(problem.run(asked))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_two_streams_do_not_take_each_other_s_tiles(head_dim: int) -> None:
    skip_elsewhere(KERNEL)
    problem = Problem(shape(head_dim, 1024, Causal.UPPER_LEFT, num_heads=16, num_heads_kv=16))
    best = KERNEL.default_config(problem.shape, HOPPER)
    expected = problem.run(best)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for stream in streams * 8:  # in turns, so that launches of both are in flight together
        with torch.cuda.stream(stream):
            found.append(problem.run(best))
    torch.cuda.synchronize()
    for gradients in found:
        problem.assert_right(gradients)
        assert torch.equal(gradients[1], expected[1])
        assert torch.equal(gradients[2], expected[2])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_a_graph_replays_beside_launches_of_another_stream(head_dim: int) -> None:
    skip_elsewhere(KERNEL)
    asked = shape(head_dim, 1024, Causal.UPPER_LEFT)
    problem, later = Problem(asked), Problem(asked, growth=2.0)
    best = KERNEL.default_config(asked, HOPPER)
    problem.run(best)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = problem.run(best)
        twice = problem.run(best)
    for name in ("q", "k", "v", "out", "lse", "dout"):
        getattr(problem, name).copy_(getattr(later, name))
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    for _ in range(3):
        graph.replay()
        with torch.cuda.stream(other):
            beside = later.run(best)
    torch.cuda.synchronize()
    for gradients in (found, twice, beside):
        later.assert_right(gradients)
    assert torch.equal(twice[1], found[1])
    assert torch.equal(beside[2], found[2])
