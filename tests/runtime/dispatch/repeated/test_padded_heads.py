"""Heads of a dimension that 8 does not divide, or narrow ones with features, are served from copies with zeros."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from blocktune import Dispatcher, flash_attn_func
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.api.hugging_face.attention import transformers_attention
from blocktune.runtime.dispatch import resolver, snapshot
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.launches.padding import Padding, padding_of
from tests.support.fakes.dispatch_fakes import ListSource
from tests.support.fakes.feature_fakes import FeatureBackward, FeatureForward, pretend_features

pytestmark = pytest.mark.triton_free

Kernels = tuple[FeatureForward, FeatureBackward]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return pretend_features(monkeypatch)


def heads(count: int, length: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, length, count, dim).to(dtype).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(("dim", "dim_v"), [(67, 67), (64, 10), (121, 128), (20, 1)])
def test_results_and_gradients_are_those_of_the_heads_themselves(dim: int, dim_v: int, kernels: Kernels) -> None:
    tensors = heads(4, 20, dim), heads(2, 30, dim), heads(2, 30, dim_v)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    out = Dispatcher(ListSource())(*tensors, **options)
    expected = scaled_dot_product_attention(*(tensor.float() for tensor in tensors), **options)
    grad = torch.randn(out.shape).to(out.dtype)
    assert out.shape == (2, 4, 20, dim_v)
    assert out.stride(2) > out.stride(1)  # ordered as the query
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    found, wanted = (torch.autograd.grad(one, tensors, grad.to(one.dtype)) for one in (out, expected))
    for ours, own in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, own, rtol=5e-2, atol=5e-2)
    for kernel in kernels:
        assert {(shape.head_dim % 8, shape.head_dim_v % 8) for shape, _ in kernel.seen} == {(0, 0)}


@pytest.mark.usefixtures("kernels")
def test_the_log_sum_exp_and_the_scale_are_of_the_heads_themselves() -> None:
    query, key, value = (heads(2, 12, 50).transpose(1, 2) for _ in range(3))
    out, sums, _ = flash_attn_func(query, key, value, return_attn_probs=True, dispatcher=Dispatcher(ListSource()))
    scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float()) * 50**-0.5
    assert out.shape == (2, 12, 2, 50)
    torch.testing.assert_close(sums, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


def test_what_needs_no_copy_gets_none(kernels: Kernels) -> None:
    forward, _ = kernels
    dispatcher = Dispatcher(ListSource())
    for tensor in (heads(2, 8, 72), heads(2, 8, 67, torch.float32)):
        with torch.no_grad():
            dispatcher(tensor, tensor, tensor)
        assert forward.seen[-1][0].head_dim == tensor.shape[3]
        assert padding_of(tensor, tensor, Call(causal=Causal.NONE, scale=1.0)) is None


def test_narrow_heads_are_widened_where_they_have_features(kernels: Kernels) -> None:
    """PyTorch has kernels of fewer than 16 columns without features alone."""
    forward, _ = kernels
    query, mask = heads(4, 20, 8), torch.rand(20, 20) > 0.3
    out = Dispatcher(ListSource())(query, query, query, mask)
    assert forward.seen[-1][0].head_dim == 16
    expected = scaled_dot_product_attention(*[query.float()] * 3, attn_mask=mask)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert padding_of(query, query, Call(causal=Causal.NONE, scale=1.0)) is None


@pytest.mark.usefixtures("kernels")
def test_calls_whose_copies_pytorch_would_compute_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, copies = [], Padding.copies
    monkeypatch.setattr(Padding, "copies", lambda *own: copied.append(own) or copies(*own))
    monkeypatch.setattr(resolver, "sdpa_backend", lambda given: SDPBackend.CUDNN_ATTENTION.value)
    monkeypatch.setattr(snapshot, "_nobody", lambda shape: "PyTorch's is faster")
    dispatcher, query, mask = Dispatcher(ListSource()), heads(4, 20, 20), torch.rand(20, 20) > 0.3
    for _ in range(3):
        dispatcher(query, query, query, mask)
    assert len(copied) == 1


def test_the_second_call_takes_the_fast_path(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = kernels
    dispatcher, query = Dispatcher(ListSource()), heads(2, 12, 50)
    rows, slopes = query.transpose(1, 2), torch.rand(2)

    def of_rows(**options: Any) -> Tensor:
        out = flash_attn_func(rows, rows, rows, causal=True, dispatcher=dispatcher, **options)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    calls: list[Any] = [
        lambda: dispatcher(query, query, query, is_causal=True),
        of_rows,
        lambda: of_rows(window_size=(5, 0)),
        lambda: of_rows(softcap=2.0, alibi_slopes=slopes),
    ]
    for call in calls:
        first = call()
        with monkeypatch.context() as patch:
            patch.setattr(Dispatcher, "serve", None)
            second = call()
        assert second.shape == query.shape
        torch.testing.assert_close(second, first)
        (gradient,) = torch.autograd.grad(second, query, torch.ones_like(second))
        assert gradient.shape == query.shape
    assert len(backward.seen) >= len(calls)
    assert all(shape.head_dim == 56 for shape, _ in forward.seen)


def test_explain_says_what_serves_the_copies(kernels: Kernels) -> None:
    query = heads(2, 8, 67)
    explanation = Dispatcher(ListSource()).explain(query, query, query)
    assert explanation.shape is not None
    assert explanation.shape.head_dim == 72


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("dim", "key_dim"), [(50, 100), (50, 52), (64, 72)])
def test_heads_of_different_dimensions_are_refused_with_copies_and_without(dim: int, key_dim: int) -> None:
    query, key = heads(2, 12, dim).detach(), heads(2, 12, key_dim).detach()
    with pytest.raises(RuntimeError):
        transformers_attention(torch.nn.Module(), query, key, query, None, softcap=2.0)
