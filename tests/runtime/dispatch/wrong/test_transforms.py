"""`torch.func` transforms of `attention` are those of PyTorch's attention, which has the rules for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktune.runtime.api.flash_attn import flash_attn_func
from blocktune.runtime.dispatch import torch_attention
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention as pytorchs
from tests.support.fakes.dispatch_fakes import ListSource, PlainKernel, pretend_h200

NOT_BATCHED = "ignore:There is a performance drop because we have not yet implemented"
pytestmark = [pytest.mark.triton_free, pytest.mark.filterwarnings(NOT_BATCHED)]

Attention = Callable[..., Tensor]
Transformed = Callable[..., Any]

torch.manual_seed(0)
Q, K = torch.randn(3, 2, 4, 20, 16), torch.randn(3, 2, 4, 24, 16)
SEEN = torch.rand(3, 2, 1, 20, 24) > 0.3
ADDED = torch.randn(3, 20, 24)
KEYS = torch.rand(3, 1, 1, 1, 24) > 0.2
"""A mask that all keys of its own share with the queries of a batch entry of another size."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    """That of a CPU that counts as a GPU, for our kernels and for PyTorch's fused backends."""
    monkeypatch.setattr(torch_attention, "FUSED_DEVICE", "cpu")
    return pretend_h200(monkeypatch)


def mapped(attention: Attention) -> Transformed:
    return torch.vmap(lambda q, k: attention(q, k, k, is_causal=True, scale=0.3))


def mapped_with_masks(attention: Attention) -> Transformed:
    return torch.vmap(lambda q, k, mask: attention(q, k, k, mask))


def masks_mapped(attention: Attention) -> Transformed:
    return torch.vmap(lambda mask: attention(Q[0], K[0], K[0], mask))


def queries_mapped(attention: Attention) -> Transformed:
    return torch.vmap(lambda q: attention(q, K[0], K[0], SEEN[0]))


def mapped_twice(attention: Attention) -> Transformed:
    return torch.vmap(torch.vmap(lambda q, k: attention(q, k[:2], k[:2], enable_gqa=True)))


def in_halves(attention: Attention) -> Transformed:
    return torch.vmap(lambda q, k, mask: attention(q.half(), k.half(), k.half(), mask))


def gradients(attention: Attention) -> Transformed:
    return torch.func.grad(lambda q, k: attention(q, k, k, SEEN[0]).square().sum(), argnums=(0, 1))


def gradients_mapped(attention: Attention) -> Transformed:
    return torch.vmap(torch.func.grad(lambda q, k, mask: attention(q, k, k, mask).square().sum(), argnums=(0, 1)))


def functional(attention: Attention) -> Transformed:
    return torch.func.functionalize(lambda q, k: attention(q, k, k, SEEN[0]))


CASES: list[tuple[Callable[[Attention], Transformed], tuple[Tensor, ...]]] = [
    (mapped, (Q, K)),
    (mapped_with_masks, (Q, K, SEEN)),
    (mapped_with_masks, (Q, K, ADDED)),
    (mapped_with_masks, (Q, K, KEYS)),
    (masks_mapped, (SEEN,)),
    (masks_mapped, (ADDED,)),
    (masks_mapped, (KEYS.expand(3, 1, 1, 20, 24),)),
    (queries_mapped, (Q,)),
    (mapped_twice, (Q, K)),
    (in_halves, (Q, K, ADDED)),
    (gradients, (Q[0], K[0])),
    (gradients_mapped, (Q, K, SEEN)),
    (functional, (Q[0], K[0])),
]


@pytest.mark.parametrize(("transformed", "arguments"), CASES)
def test_a_transform_is_pytorchs(
    kernel: PlainKernel, transformed: Callable[[Attention], Transformed], arguments: tuple[Tensor, ...]
) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # which the dispatcher takes for masks on a GPU
        ours, theirs = transformed(Dispatcher(ListSource()))(*arguments), transformed(pytorchs)(*arguments)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)
    assert kernel.launched == []


def test_masks_reach_no_fused_backend_there(kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[bool] = []

    def spy(*arguments: Any, **options: Any) -> Tensor:
        fused.append(torch.backends.cuda.mem_efficient_sdp_enabled())
        return pytorchs(*arguments, **options)

    monkeypatch.setattr("blocktune.runtime.dispatch.torch_attention.scaled_dot_product_attention", spy)
    masks_mapped(Dispatcher(ListSource()))(SEEN)
    mapped(Dispatcher(ListSource()))(Q, K)
    assert fused == [False, True]


def test_autocast_is_what_pytorch_makes_of_it_there(kernel: PlainKernel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = mapped(Dispatcher(ListSource()))(Q, K), mapped(pytorchs)(Q, K)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)


def test_pytorch_gets_the_call_as_it_is(kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rules know what mask belongs to which entry, which nothing that is done to a mask before may hide."""
    seen: list[Any] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *others: Any, **options: Any) -> Tensor:
        seen.append((mask.shape, mask.stride(), options))
        return pytorchs(query, key, value, mask, *others, **options)

    monkeypatch.setattr("blocktune.runtime.dispatch.torch_attention.scaled_dot_product_attention", spy)
    mask = torch.rand(3, 20, 1).expand(3, 20, 24)
    torch.vmap(lambda q, k, m: Dispatcher(ListSource())(q, k, k, m, scale=0.5))(Q, K, mask)
    assert seen == [((20, 24), (1, 0), {"scale": 0.5, "enable_gqa": False})]


def test_a_negative_scale_is_right_there_too(kernel: PlainKernel) -> None:
    ours = torch.vmap(lambda q, k: Dispatcher(ListSource())(q, k, k, scale=-0.3))(Q, K)
    torch.testing.assert_close(ours, (Q @ K.mT * -0.3).softmax(-1) @ K)


def test_flash_attentions_functions_can_be_mapped_as_well(kernel: PlainKernel) -> None:
    q, k = Q.transpose(2, 3), K.transpose(2, 3)
    options: dict[str, Any] = {"causal": True, "window_size": (5, -1), "softcap": 3.0}
    ours = torch.vmap(lambda q, k: flash_attn_func(q, k, k, **options))(q, k)
    each = [flash_attn_func(*(one.contiguous() for one in (a, b, b)), **options) for a, b in zip(q, k, strict=True)]
    torch.testing.assert_close(ours, torch.stack(each))
