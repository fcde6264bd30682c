"""PyTorch's attention ops by our kernels, on a CPU that stands for a GPU: results, gradients, what falls through."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from blocktune.kernels import registry
from blocktune.kernels.values.reference import attention_reference
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.selection.fallback import PACKED
from tests.support.attention.varlen_options import WRITES_IN_PLACE, one_part_or_any, takes_output, takes_pages
from tests.support.fakes.feature_fakes import FeatureBackward, FeatureForward, pretend_features
from tests.support.fakes.provider_fakes import Standins, provided

pytestmark = pytest.mark.triton_free

Kernels = tuple[FeatureForward, FeatureBackward]

aten = torch.ops.aten


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return pretend_features(monkeypatch)


@pytest.fixture
def standins(kernels: Kernels) -> Iterator[Standins]:
    """PyTorch's kernels, below ours."""
    del kernels
    made = Standins()
    with provided(made):
        yield made


def inputs(*shape: int, seqlen_k: int | None = None, heads_kv: int | None = None) -> list[Tensor]:
    """Query, key and value [batch, heads, length, 16] with gradients."""
    torch.manual_seed(0)
    batch, heads, length = shape
    keys = (batch, heads_kv or heads, seqlen_k or length, 16)
    return [torch.randn(size, requires_grad=True) for size in ((batch, heads, length, 16), keys, keys)]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def turned(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def check_gradients(out: Tensor, tensors: list[Tensor], wanted: Tensor, others: list[Tensor]) -> None:
    torch.testing.assert_close(out, wanted)
    weights = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(out, tensors, weights), torch.autograd.grad(wanted, others, weights), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_flash_pair(standins: Standins, kernels: Kernels, is_causal: bool, scale: float | None, heads_kv: int) -> None:
    tensors = inputs(2, 4, 24, heads_kv=heads_kv)
    others = copies(tensors)
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*tensors, 0.0, is_causal, scale=scale)
    wanted = scaled_dot_product_attention(*others, is_causal=is_causal, scale=scale, enable_gqa=True)
    assert (lse.shape, lse.dtype) == ((2, 4, 24), torch.float32)
    assert rest[:4] == [None, None, 24, 24]
    assert [(tensor.shape, tensor.dtype) for tensor in rest[4:]] == [
        ((2,), torch.uint64),
        ((), torch.uint64),
        ((0,), torch.float32),
    ]
    check_gradients(out, tensors, wanted, others)
    assert standins.calls == []
    assert all(kernel.launched for kernel in kernels)


def test_flash_is_causal_from_the_lower_right(standins: Standins) -> None:
    tensors = inputs(1, 2, 8, seqlen_k=24)
    found = aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)
    wanted, sums = attention_reference(*tensors, causal=Causal.LOWER_RIGHT, scale=0.25)
    torch.testing.assert_close(found[0], wanted)
    torch.testing.assert_close(found[1], sums)
    assert standins.calls == []


MASKS = {
    "none": None,
    "batch": torch.randn(2, 4, 24, 24),
    "shared": torch.randn(24, 24),
    "keys": torch.randn(2, 1, 1, 24),
    "boolean": torch.rand(2, 1, 24, 24) > 0.3,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_cudnn_pair(standins: Standins, mask: str, is_causal: bool) -> None:
    tensors, bias = inputs(2, 4, 24), MASKS[mask]
    others = copies(tensors)
    out, lse, *rest = aten._scaled_dot_product_cudnn_attention(*tensors, bias, True, 0.0, is_causal)
    hidden = torch.zeros(24, 24).masked_fill(~torch.ones(24, 24).bool().tril(), float("-inf") if is_causal else 0.0)
    if bias is not None:
        hidden = hidden + (bias if bias.is_floating_point() else torch.zeros(()).where(bias, float("-inf")))
    wanted = scaled_dot_product_attention(*others, hidden)
    assert (lse.shape, lse.dtype) == ((2, 4, 24, 1), torch.float32)
    assert (rest[:4], rest[6]) == ([None, None, 24, 24], None)
    assert [(tensor.shape, tensor.dtype) for tensor in rest[4:6]] == [((), torch.int64)] * 2
    check_gradients(out, tensors, wanted, others)
    assert standins.calls == []


def test_cudnn_without_log_sum_exp(standins: Standins) -> None:
    tensors = [tensor.detach() for tensor in inputs(2, 4, 24)]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*tensors, None, False)
    torch.testing.assert_close(out, scaled_dot_product_attention(*tensors))
    assert lse is None
    assert standins.calls == []


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (3, 2), (5, None)])
def test_flash_worker_of_dense_tensors(
    standins: Standins, is_causal: bool, window: tuple[int | None, int | None]
) -> None:
    tensors = inputs(2, 4, 24)
    others = copies(tensors)
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, *_ = aten._flash_attention_forward(*turned(tensors), None, None, 24, 24, 0.0, is_causal, False, **sides)
    seen = band(24, 24, -1 if window[0] is None else window[0], -1 if window[1] is None else window[1], is_causal)
    wanted = scaled_dot_product_attention(*others, seen)
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    grad = torch.randn_like(out)
    gradients = aten._flash_attention_backward(
        grad, *turned(tensors), out, lse, None, None, 24, 24, 0.0, is_causal, *torch.zeros(2), **sides
    )
    for one, other in zip(gradients, torch.autograd.grad(wanted, others, grad.transpose(1, 2)), strict=True):
        torch.testing.assert_close(one.transpose(1, 2), other)
    assert standins.calls == []


def band(rows: int, columns: int, left: int, right: int, is_causal: bool) -> Tensor:
    """The pairs of a window around the diagonal that ends in the lower right corner."""
    offset = torch.arange(columns)[None] - torch.arange(rows)[:, None] - (columns - rows)
    right = 0 if is_causal else right
    seen = torch.ones(rows, columns, dtype=torch.bool)
    seen &= (offset >= -left) if left >= 0 else True
    return seen & ((offset <= right) if right >= 0 else True)


LENGTHS = [5, 1, 9]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(lengths: list[int] = LENGTHS, heads_kv: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    tokens = sum(lengths)
    return [torch.randn(tokens, heads, 16, requires_grad=True) for heads in (2, heads_kv, heads_kv)]


def by_sequence(tensors: list[Tensor], window: tuple[int, int] = (-1, -1), lengths: list[int] = LENGTHS) -> Tensor:
    """Attention of each sequence by PyTorch."""
    sequences = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
    outs = []
    for q, k, v in sequences:
        seen = band(len(q), len(k), *window, is_causal=False)
        outs.append(
            scaled_dot_product_attention(*(one.transpose(0, 1)[None] for one in (q, k, v)), seen, enable_gqa=True)
        )
    return torch.cat([out[0].transpose(0, 1) for out in outs])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
@one_part_or_any
def test_varlen_attn_is_served_and_differentiable(
    standins: Standins,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    window: tuple[int, int],
    more: dict[str, int],
) -> None:
    monkeypatch.setitem(registry.KERNELS, PACKED[0], kernels[0])  # which serves a fixed number of splits
    tensors, begins = packed(), bounds(LENGTHS)
    others = copies(tensors)
    out, lse = varlen_attn(*tensors, begins, begins, 9, 9, window_size=window, return_aux=AuxRequest(lse=True), **more)
    assert (lse.shape, lse.dtype) == ((2, 15), torch.float32)
    check_gradients(out, tensors, by_sequence(others, window), others)
    assert standins.calls == []


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_outputs_may_be_written_to(standins: Standins, mode: Any) -> None:
    """As PyTorch's own may."""
    begins = bounds(LENGTHS)
    with mode():
        for _ in range(5):
            tensors = [tensor.detach().clone() for tensor in packed()]
            if mode is torch.enable_grad:
                tensors = copies(tensors)
            out = varlen_attn(*tensors, begins, begins, 9, 9)
            assert not out._is_view()
            before = out.clone()
            torch.testing.assert_close(out.mul_(2), 2 * before)
    assert standins.calls == []


@takes_output
def test_varlen_attn_writes_into_a_given_output(standins: Standins) -> None:
    tensors, begins = [tensor.detach() for tensor in packed(heads_kv=1)], bounds(LENGTHS)
    out = torch.empty_like(tensors[0])
    varlen.varlen_attn_out(out, *tensors, begins, begins, 9, 9, window_size=(-1, 0), enable_gqa=True)
    torch.testing.assert_close(out, by_sequence(tensors, (-1, 0)))
    assert standins.calls == []


@takes_pages
def test_varlen_attn_of_keys_that_are_partly_filled(standins: Standins) -> None:
    query, *_ = (tensor.detach() for tensor in packed())
    keys, values = torch.randn(2, 30, 2, 16).unbind()
    begins, used = bounds([10, 10, 10]), [7, 2, 10]
    out = varlen_attn(
        query, keys, values, bounds(LENGTHS), begins, 9, 10, seqused_k=torch.tensor(used, dtype=torch.int32)
    )
    rows = torch.cat([torch.arange(10 * place, 10 * place + length) for place, length in enumerate(used)])
    wanted = [
        scaled_dot_product_attention(*(one.transpose(0, 1)[None] for one in three))[0].transpose(0, 1)
        for three in zip(query.split(LENGTHS), keys[rows].split(used), values[rows].split(used), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(wanted))
    assert standins.calls == []


def test_flash_workers_of_packed_tensors(standins: Standins) -> None:
    tensors, begins = packed(), bounds(LENGTHS)
    others = copies(tensors)
    out, lse, *rest = aten._flash_attention_forward(*tensors, begins, begins, 9, 9, 0.0, True, False)
    wanted = by_sequence(others, (-1, 0))
    torch.testing.assert_close(out, wanted)
    assert [tuple(tensor.shape) for tensor in (lse, *rest)] == [(2, 15), (2,), (), (0,)]
    grad = torch.randn_like(out)
    gradients = aten._flash_attention_backward(
        grad, *tensors, out, lse, begins, begins, 9, 9, 0.0, True, *torch.zeros(2)
    )
    for one, other in zip(gradients, torch.autograd.grad(wanted, others, grad), strict=True):
        torch.testing.assert_close(one, other)
    assert standins.calls == []


@pytest.mark.skipif(not WRITES_IN_PLACE, reason="this PyTorch has no worker that writes into a given output")
def test_a_flash_worker_writes_into_a_given_output(standins: Standins) -> None:
    tensors, begins = packed(), bounds(LENGTHS)
    into, plain = torch.empty_like(tensors[0]).detach(), [tensor.detach() for tensor in tensors]
    aten._flash_attention_forward_no_dropout_inplace(into, *plain, begins, begins, 9, 9, 0.0, True, False)
    torch.testing.assert_close(into, by_sequence(plain, (-1, 0)))
    assert standins.calls == []


def test_packed_keys_that_begin_nowhere_are_pytorchs_to_judge(standins: Standins) -> None:
    tensors, begins = [torch.randn(12, 2, 16) for _ in range(5)], torch.tensor([0, 4, 12], dtype=torch.int32)
    aten._flash_attention_backward(*tensors, torch.zeros(2, 12), begins, None, 8, 8, 0.0, False, *torch.zeros(2))
    assert standins.names == ["_flash_attention_backward"]


@pytest.mark.parametrize("kind", ["cudnn", "flash", "varlen"])
def test_compiled_graphs_call_the_ops(standins: Standins, kind: str) -> None:
    """With the strides and types that PyTorch's own descriptions of the ops promise."""
    begins, is_packed = bounds(LENGTHS), kind == "varlen"
    bias = torch.randn(2, 1, 24, 24)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if kind == "varlen":
            return varlen_attn(query, key, value, begins, begins, 9, 9, window_size=(-1, 0))
        if kind == "flash":
            return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
        return aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True)[0]

    laid = (one.detach().transpose(1, 2).contiguous().transpose(1, 2) for one in inputs(2, 4, 24))
    tensors = packed() if is_packed else [one.requires_grad_() for one in laid]
    others = copies(tensors)
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors)
    check_gradients(out, tensors, attend(*others), others)
    assert standins.calls == []
