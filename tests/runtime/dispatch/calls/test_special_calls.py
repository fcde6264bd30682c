"""Scales, masks and sizes that PyTorch's backends answer wrong, or that nothing is to be computed for."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.backends import cuda as backends
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.torch_version import TorchVersion

from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.reference import attention_reference
from blocktune.runtime.api.flash_attn import flash_attn_func
from blocktune.runtime.dispatch import resolver, snapshot, torch_attention
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.launches.memory_layout import copy_to_layout, fits_layout, memory_layout
from blocktune.runtime.selection.ladder import Rung
from tests.support.fakes.dispatch_fakes import ListSource, PlainKernel, pretend_h200

pytestmark = pytest.mark.triton_free

Seen = list[dict[str, Any]]
ALLOWED = {
    "flash": backends.flash_sdp_enabled,
    "efficient": backends.mem_efficient_sdp_enabled,
    "cudnn": backends.cudnn_sdp_enabled,
    "math": backends.math_sdp_enabled,
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    return pretend_h200(monkeypatch)


@pytest.fixture
def asked_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What PyTorch's attention is called with, on a CPU that counts as a GPU."""
    seen: Seen = []

    def spy(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *others: Any, **options: Any
    ) -> Tensor:
        allowed = {name for name, is_allowed in ALLOWED.items() if is_allowed()}
        seen.append({"query": query, "key": key, "mask": attn_mask, "allowed": allowed})
        return scaled_dot_product_attention(query, key, value, attn_mask, *others, **options)

    monkeypatch.setattr(torch_attention, "FUSED_DEVICE", "cpu")
    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", spy)
    return seen


def three(length: int = 20, dim: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 4, length, dim).to(dtype) for _ in range(3)]


def in_float64(tensors: list[Tensor], scale: float, mask: Tensor | None = None) -> Tensor:
    query, key, value = (tensor.double() for tensor in tensors)
    scores = query @ key.mT * scale
    return (scores if mask is None else scores + mask.double()).softmax(-1) @ value


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_our_kernels_compute_scales_that_are_not_positive(kernel: PlainKernel, scale: float) -> None:
    dispatcher, tensors = Dispatcher(ListSource()), three()
    dispatcher(*tensors)
    launches = len(kernel.launched)
    for count in (1, 2):
        got = dispatcher(*tensors, scale=scale)
        torch.testing.assert_close(got.double(), in_float64(tensors, scale), atol=1e-5, rtol=1e-5)
        assert len(kernel.launched) == launches + count
    assert dispatcher.explain(*tensors, scale=scale).rung is Rung.DEFAULT


def test_a_scale_that_is_no_number_gives_none(kernel: PlainKernel) -> None:
    assert Dispatcher(ListSource())(*three(), scale=math.nan).isnan().all()


@pytest.mark.parametrize("attend", [Dispatcher(ListSource()), torch.compile(Dispatcher(ListSource()), backend="eager")])
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_gradients_of_scales_that_are_not_positive(attend: Callable[..., Tensor], scale: float) -> None:
    leaves = [tensor.requires_grad_() for tensor in three()]
    mask = torch.randn(20, 20)
    for options in ({}, {"attn_mask": mask}):
        got = torch.autograd.grad(attend(*leaves, **options, scale=scale).sum(), leaves)
        right = torch.autograd.grad(in_float64(leaves, scale, options.get("attn_mask")).sum(), leaves)
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def test_features_with_a_negative_scale() -> None:
    query, key, value = (tensor.transpose(1, 2) for tensor in three())
    options: dict[str, Any] = {"softcap": 3.0, "window_size": (5, 5)}
    got = flash_attn_func(query, key, value, softmax_scale=-0.2, **options)
    torch.testing.assert_close(got, flash_attn_func(-query, key, value, softmax_scale=0.2, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pytorch_gets_a_float32_mask_with_float32_tensors_and_computes_by_definition(
    asked_of_pytorch: Seen, dtype: torch.dtype
) -> None:
    tensors, mask = three(dtype=dtype), torch.randn(20, 20)
    before = [is_allowed() for is_allowed in ALLOWED.values()]
    got = Dispatcher(ListSource())(*tensors, mask)
    assert got.dtype is dtype
    (seen,) = asked_of_pytorch
    assert (seen["query"].dtype, seen["mask"].dtype, seen["allowed"]) == (torch.float32, torch.float32, {"math"})
    assert [is_allowed() for is_allowed in ALLOWED.values()] == before
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), in_float64(tensors, 0.125, mask), atol=eps, rtol=eps)


def test_a_mask_of_the_querys_type_changes_no_type(asked_of_pytorch: Seen) -> None:
    Dispatcher(ListSource())(*three(dtype=torch.float16), torch.randn(20, 20).half())
    assert asked_of_pytorch[0]["query"].dtype is torch.float16
    assert asked_of_pytorch[0]["allowed"] == {"flash", "efficient", "math"}


def test_calls_without_a_mask_leave_pytorch_the_choice(asked_of_pytorch: Seen) -> None:
    Dispatcher(ListSource())(*three(dtype=torch.float16))
    assert asked_of_pytorch[0]["allowed"] == set(ALLOWED)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_value_with_other_keys_reaches_no_fused_backend(asked_of_pytorch: Seen, gradients: bool) -> None:
    query, key, value = (tensor.requires_grad_(gradients) for tensor in three(dtype=torch.float16))
    with pytest.raises(RuntimeError, match="size"):
        Dispatcher(ListSource())(query, key, torch.cat((value, value[:, :, :1]), 2))
    assert [seen["allowed"] for seen in asked_of_pytorch] == [{"math"}]


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_of_none_is_computed_by_definition(asked_of_pytorch: Seen, batch: int) -> None:
    query = torch.randn(batch, 4, 20, 64)
    assert Dispatcher(ListSource())(query, query, query).shape == query.shape
    assert (asked_of_pytorch[0]["allowed"] == {"math"}) is (batch == 0)


def test_what_is_not_aligned_is_copied_but_not_what_pytorchs_mathematics_take(asked_of_pytorch: Seen) -> None:
    query, key, value = (torch.randn(1, 4, 20, 67)[..., :64] for _ in range(3))
    Dispatcher(ListSource())(query, key, value)
    turned = torch.randn(1, 4, 67, 20).mT[..., :64]
    Dispatcher(ListSource())(query, turned, value)
    copied, kept = asked_of_pytorch
    assert copied["query"].is_contiguous()
    assert kept["query"].data_ptr() == query.data_ptr()
    assert kept["key"].data_ptr() == turned.data_ptr()


def test_a_scale_of_nothing_leaves_no_gradient_however_large_the_keys_are(kernel: PlainKernel) -> None:
    query, key, value = three(dtype=torch.float16)
    query.requires_grad_()
    out = Dispatcher(ListSource())(query, key * 1e4, value * 1e4, scale=0.0)
    assert (torch.autograd.grad(out.sum(), query)[0] == 0).all()


@pytest.mark.parametrize("sizes", [(20, 1), (1, 1, 20, 1), (4, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_pytorch_gets_a_mask_with_an_element_for_each_key(
    asked_of_pytorch: Seen, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors, mask = three(), (torch.randn(sizes) > -1).to(dtype)
    for given in (mask, mask.expand(*sizes[:-1], 20), mask.expand(1, 4, 20, 20)):
        got = Dispatcher(ListSource())(*tensors, given)
        torch.testing.assert_close(got, scaled_dot_product_attention(*tensors, mask.expand(1, 4, 20, 20)))
        assert asked_of_pytorch[-1]["mask"].stride(-1) == 1
        assert asked_of_pytorch[-1]["mask"].numel() <= mask.numel() * 20


def test_a_mask_with_an_element_for_each_key_stays_where_it_is(asked_of_pytorch: Seen) -> None:
    mask = torch.randn(1, 20).expand(20, 20)
    Dispatcher(ListSource())(*three(), mask)
    assert asked_of_pytorch[0]["mask"].data_ptr() == mask.data_ptr()


def test_gradients_of_masks_come_through(asked_of_pytorch: Seen) -> None:
    tensors, mask = three(dtype=torch.float16), torch.randn(20, 1, requires_grad=True)
    (got,) = torch.autograd.grad(Dispatcher(ListSource())(*tensors, mask).float().sum(), mask)
    assert got.shape == (20, 1)
    assert len(asked_of_pytorch) == 1


@pytest.mark.parametrize("dim_v", [0, 8])
@pytest.mark.parametrize("mask", [None, torch.zeros(4, 4)])
def test_queries_without_elements_are_pytorchs(dim_v: int, mask: Tensor | None) -> None:
    query = torch.randn(1, 2, 4, 0, requires_grad=True)
    value = torch.randn(1, 2, 4, dim_v, requires_grad=True)
    results = []
    for attend in (Dispatcher(ListSource()), scaled_dot_product_attention):
        out = attend(query, query, value, mask)
        results.append((out, *torch.autograd.grad(out.sum(), (query, value), allow_unused=True)))
    torch.testing.assert_close(*results)


def test_a_float32_mask_of_float64_tensors_is_read_as_what_it_is() -> None:
    tensors, mask = three(dtype=torch.float64), torch.randn(20, 20)
    torch.testing.assert_close(Dispatcher(ListSource())(*tensors, mask), in_float64(tensors, 0.125, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9])
def test_rows_that_finite_numbers_hide_have_the_gradients_of_float64_on_the_cpu(
    hidden: float, dtype: torch.dtype
) -> None:
    tensors = [tensor.requires_grad_() for tensor in three(32, dtype=dtype)]
    hidden = max(hidden, torch.finfo(dtype).min)
    mask = torch.zeros(1, 1, 32, 32, dtype=dtype).masked_fill_(torch.arange(32)[:, None] % 3 == 0, hidden)
    mask[..., ::6, ::5] = -math.inf
    out = Dispatcher(ListSource([]))(*tensors, attn_mask=mask)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, grad)
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    deep = mask if dtype is torch.float64 else mask.double().masked_fill(mask.isfinite() & (mask < -1e8), -1e38)
    right = in_float64(leaves, 0.125, deep)  # float64 keeps the scores beside -1e9
    tolerance = 4 * torch.finfo(dtype).eps if dtype is not torch.float64 else 1e-9
    for own, wanted in zip(found, torch.autograd.grad(right, leaves, grad.double()), strict=True):
        assert (own.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("window", [None, (40, 40)])
def test_features_on_the_cpu_leave_hidden_rows_the_mean_of_their_values(window: tuple[int, int] | None) -> None:
    """Those are computed by the definition, in float32."""
    query, key, value = three()
    features = Features(window=window, mask=MaskKind.ADDITIVE)
    mask = torch.full((1, 1, 20, 20), torch.finfo(torch.float32).min)
    out, _ = attention_reference(query, key, value, features=features, extras=Extras(mask=mask))
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_dropout_draws_on_the_cpu_whatever_the_default_device_is(device: str) -> None:
    q = torch.randn(1, 20, 2, 16)
    torch.manual_seed(3)
    wanted = flash_attn_func(q, q, q, dropout_p=0.5, softcap=2.0)
    torch.manual_seed(3)
    with torch.device(device):
        assert torch.equal(flash_attn_func(q, q, q, dropout_p=0.5, softcap=2.0), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [1e5, 1e30, 3e38])
def test_a_huge_soft_cap_changes_no_score_and_bounds_infinite_ones(dtype: torch.dtype, softcap: float) -> None:
    q, k, v = (torch.randn(1, 8, 2, 16, dtype=dtype) for _ in range(3))
    plain = flash_attn_func(q, k, v)
    torch.testing.assert_close(
        flash_attn_func(q, k, v, softcap=softcap), plain, atol=4 * torch.finfo(dtype).eps, rtol=0
    )
    q[..., 0] = 1.0
    k[:, 3, :, 0] = float("inf")
    assert torch.equal(flash_attn_func(q, k, v, softcap=softcap), v[:, 3:4].expand_as(v))


def test_a_mask_for_all_heads_and_one_that_is_expanded_have_one_layout() -> None:
    padding = torch.rand(2, 1, 1, 16) > 0.5
    layout = memory_layout(padding)
    expanded = padding.expand(2, 3, 16, 16)
    assert fits_layout(expanded, layout)
    restored = expanded.contiguous()  # as a hook brings it back
    assert not fits_layout(restored, layout)
    again = copy_to_layout(restored, layout)
    assert fits_layout(again, layout)
    assert torch.equal(again, expanded)
    assert again.untyped_storage().nbytes() <= padding.untyped_storage().nbytes()
    dense = torch.rand(2, 3, 4, 5).transpose(1, 2)
    assert torch.equal(copy_to_layout(dense.contiguous(), memory_layout(dense)), dense)


@pytest.mark.parametrize(
    ("backend", "most_bytes", "competes"),
    [
        (SDPBackend.CUDNN_ATTENTION, 0, True),
        (SDPBackend.MATH, 1 << 30, True),
        (SDPBackend.MATH, 0, False),
        (SDPBackend.ERROR, 1 << 30, False),
    ],
)
def test_pytorch_competes_where_its_scores_fit_in_little_memory(
    monkeypatch: pytest.MonkeyPatch, backend: SDPBackend, most_bytes: int, competes: bool
) -> None:
    kernel, dispatcher = pretend_h200(monkeypatch), Dispatcher(ListSource())
    monkeypatch.setattr(resolver, "sdpa_backend", lambda given: backend.value)
    monkeypatch.setattr(resolver, "MAX_SCORES_BYTES", most_bytes)
    monkeypatch.setattr(snapshot, "_nobody", lambda shape: "PyTorch's is faster")
    dispatcher(*three(64))
    assert bool(kernel.launched) is not competes


@pytest.mark.parametrize(
    ("version", "refuses"),
    [
        ("2.13.1+cu130", False),
        ("2.14.0.dev20260901", True),
        ("2.14.0.dev20260901+cu130", True),
        ("2.14.0a0+git3f9696f", True),
        ("2.14.0rc1", True),
        ("2.14.0", True),
        ("2.15.0a0", True),
    ],
)
def test_builds_before_a_release_answer_as_it_does(version: str, refuses: bool) -> None:
    """From 2.14 on, PyTorch itself refuses a mask together with is_causal."""
    assert (TorchVersion(version) >= torch_attention.FIRST_REFUSING) is refuses
