"""Programs that know nothing of blocktune, on a GPU with the provider active: results, gradients, what runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
    varlen,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels.values.shape import Direction
from blocktune.runtime.dispatch.dispatcher import Dispatcher, attention
from blocktune.runtime.dispatch.launches.plans import KernelPlan, TorchPlan
from blocktune.runtime.provider import PROVIDER
from blocktune.runtime.provider.registration import register_provider
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung
from tests.support.attention.varlen_options import GROUPS, TAKES_GROUPS, one_part_or_any, takes_pages

pytestmark = pytest.mark.gpu

BOUND = 1.5e-2
"""Relative Frobenius error of bfloat16."""

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
BACKENDS = pytest.mark.parametrize("backend", [FLASH, CUDNN], ids=["flash", "cudnn"])


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    """Plans are made by the test alone, by configs that have been read."""
    register_provider()
    attention.reload()
    attention._settle(None)
    yield
    restore_flash_attention_impl(_raise_warn=False)


@contextmanager
def provider() -> Iterator[None]:
    activate_flash_attention_impl(PROVIDER)
    yield
    restore_flash_attention_impl()


def launches() -> int:
    """How often our kernels ran, in either direction."""
    plans = attention.resolver.plans.values()
    return sum(plan.calls for plan in plans if isinstance(plan, KernelPlan))


def dense(seqlen: int = 512, *, heads_kv: int = 8, head_dim: int = 64, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, seqlen, heads, head_dim) for heads in (8, heads_kv, heads_kv))
    made = [torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes]
    return [tensor.requires_grad_(grad) for tensor in made]


def in_float64(tensors: list[Tensor], attend: Callable[..., Tensor], grad: Tensor) -> list[Tensor]:
    """Output and gradients by PyTorch's mathematics in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, right in zip(found, wanted, strict=True):
        assert torch.linalg.norm(one.double() - right) <= BOUND * torch.linalg.norm(right)


def run(tensors: list[Tensor], attend: Callable[..., Tensor], grad: Tensor) -> list[Tensor]:
    out = attend(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


@BACKENDS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_unmodified_training_step(backend: SDPBackend, is_causal: bool, compiled: bool) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    tensors = dense()
    grad = torch.randn_like(tensors[0])
    with sdpa_kernel(backend), provider():
        before = launches()
        step = torch.compile(attend, fullgraph=True) if compiled else attend
        first, again = (run(tensors, step, grad) for _ in range(2))
        assert launches() == before + 4
    wanted = in_float64(tensors, attend, grad)
    check(first, wanted)
    check(again, wanted)  # sums of the backward's parts come in any order
    assert torch.equal(first[0], again[0])
    assert first[0].stride() == tensors[0].stride()


@pytest.mark.parametrize("mask", ["batch", "heads", "padding", "boolean"])
def test_masks_by_the_cudnn_ops(mask: str) -> None:
    tensors = dense()
    bias = {
        "batch": torch.randn(2, 8, 512, 512, device="cuda", dtype=torch.bfloat16),
        "heads": torch.randn(1, 8, 512, 512, device="cuda", dtype=torch.bfloat16),
        "padding": torch.zeros(2, 1, 512, 512, device="cuda", dtype=torch.bfloat16).masked_fill(
            torch.arange(512, device="cuda") > 300, float("-inf")
        ),
        "boolean": torch.rand(2, 1, 512, 512, device="cuda") > 0.3,
    }[mask]
    grad = torch.randn_like(tensors[0])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = bias if bias.dtype is torch.bool else bias.to(query.dtype)
        return scaled_dot_product_attention(query, key, value, own)

    with sdpa_kernel(CUDNN), provider():
        before = launches()
        found = run(tensors, attend, grad)
        assert launches() == before + 2
    check(found, in_float64(tensors, attend, grad))


@BACKENDS
def test_dropout_is_pytorchs(backend: SDPBackend) -> None:
    tensors = dense()
    with sdpa_kernel(backend), provider():
        before = launches()
        scaled_dot_product_attention(*tensors, dropout_p=0.5).sum().backward()
        assert launches() == before


@BACKENDS
@pytest.mark.parametrize("ours", [Direction.FORWARD, Direction.BACKWARD])
def test_directions_may_be_mixed(monkeypatch: pytest.MonkeyPatch, backend: SDPBackend, ours: Direction) -> None:
    """PyTorch's backward takes our log-sum-exp, and ours takes PyTorch's."""
    plan_of = Dispatcher.plan

    def one_way(self: Dispatcher, *arguments: Any) -> Any:
        if arguments[4] is not ours:
            return TorchPlan(Explanation(rung=Rung.SDPA, reason="the test wants it"))
        return plan_of(self, *arguments)

    monkeypatch.setattr(Dispatcher, "plan", one_way)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    tensors = dense()
    grad = torch.randn_like(tensors[0])
    with sdpa_kernel(backend), provider():
        before = launches()
        found = run(tensors, attend, grad)
        assert launches() == before + 1
    check(found, in_float64(tensors, attend, grad))


@BACKENDS
def test_restoring_gives_pytorchs_bits_back(backend: SDPBackend) -> None:
    tensors = dense(grad=False)
    with sdpa_kernel(backend):
        first = scaled_dot_product_attention(*tensors)
        with provider():
            ours = scaled_dot_product_attention(*tensors)
        again = scaled_dot_product_attention(*tensors)
    assert torch.equal(first, again)
    torch.testing.assert_close(ours, first, rtol=2e-2, atol=2e-2)


@BACKENDS
def test_a_cuda_graph_holds_our_kernels(backend: SDPBackend) -> None:
    tensors = dense(grad=False)
    with sdpa_kernel(backend), provider():
        wanted = scaled_dot_product_attention(*tensors, is_causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = scaled_dot_product_attention(*tensors, is_causal=True)
        graph.replay()
    assert torch.equal(out, wanted)


LENGTHS = [300, 17, 512, 64]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def packed() -> list[Tensor]:
    torch.manual_seed(0)
    heads_kv = 4 if TAKES_GROUPS else 8
    sizes = ((sum(LENGTHS), heads, 64) for heads in (8, heads_kv, heads_kv))
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]


def by_sequence(window: tuple[int, int]) -> Callable[..., Tensor]:
    """Attention of each packed sequence by PyTorch."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs = []
        for q, k, v in zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True):
            far = torch.arange(len(k), device="cuda")[None] - torch.arange(len(q), device="cuda")[:, None]
            seen = (far >= -window[0]) if window[0] >= 0 else torch.ones_like(far, dtype=torch.bool)
            seen = seen & (far <= window[1]) if window[1] >= 0 else seen
            turned = (one.transpose(0, 1)[None] for one in (q, k, v))
            outs.append(scaled_dot_product_attention(*turned, seen, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(outs)

    return attend


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0)])
@one_part_or_any
def test_varlen_attn(window: tuple[int, int], more: dict[str, int]) -> None:
    tensors, begins = packed(), bounds(LENGTHS)
    grad = torch.randn_like(tensors[0])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attn(query, key, value, begins, begins, 512, 512, window_size=window, **GROUPS, **more)

    with provider():
        before = launches()
        first, again = (run(tensors, attend, grad) for _ in range(2))
        assert launches() == before + 4
    wanted = in_float64(tensors, by_sequence(window), grad)
    check(first, wanted)
    check(again, wanted)


@takes_pages
@pytest.mark.parametrize("queries", [1, 16, 100])
def test_varlen_attn_over_pages(queries: int) -> None:
    used, page = [700, 130, 1000], 64
    table = torch.randperm(3 * 16, device="cuda").int().view(3, 16)
    pages = torch.randn(2, 48, page, 4, 128, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(3 * queries, 8, 128, device="cuda", dtype=torch.bfloat16)
    begins, counts = bounds([queries] * 3), torch.tensor(used, device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": counts, "block_table": table}
    out = torch.empty_like(query)
    with provider(), torch.no_grad():
        before = launches()
        first, lse = varlen_attn(query, *pages, begins, None, queries, 1024, return_aux=AuxRequest(lse=True), **options)
        if hasattr(varlen, "varlen_attn_out"):  # torch 2.12 and newer
            varlen.varlen_attn_out(out, query, *pages, begins, None, queries, 1024, **options)
            torch.testing.assert_close(out, first)
        assert launches() > before
    assert lse.shape == (8, 3 * queries)
    for place, length in enumerate(used):
        keys, values = (part[table[place].long()].flatten(0, 1)[:length].double() for part in pages)
        own = slice(place * queries, (place + 1) * queries)
        seen = torch.ones(queries, length, device="cuda", dtype=torch.bool).tril(length - queries)
        turned = (one.transpose(0, 1)[None] for one in (query[own].double(), keys, values))
        with sdpa_kernel(SDPBackend.MATH):
            wanted = scaled_dot_product_attention(*turned, seen, enable_gqa=True)[0].transpose(0, 1)
        check([first[own]], [wanted])


def test_flash_workers_of_nested_tensors() -> None:
    """Jagged tensors call FlashAttention's workers with the bounds of their sequences."""
    torch.manual_seed(0)
    parts = [[torch.randn(length, 8, 64, device="cuda", dtype=torch.bfloat16) for length in LENGTHS] for _ in range(3)]
    nested = [torch.nested.nested_tensor(part, layout=torch.jagged).transpose(1, 2) for part in parts]
    with sdpa_kernel(FLASH), provider():
        before = launches()
        out = scaled_dot_product_attention(*nested)
        assert launches() == before + 1
    joined = [torch.cat(part) for part in parts]
    (wanted, *_) = in_float64(joined, by_sequence((-1, -1)), torch.ones_like(joined[0]))
    check([out.transpose(1, 2).values()], [wanted])
