"""Attention sinks and the gradient of the log-sum-exp, at every entry point, against float64 and autograd: PyTorch's
mathematics on the CPU, our kernels on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blocktune import (
    UsageError,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_partial,
)
from blocktune.kernels.values.errors import WrongTypeError
from tests.runtime.api.test_flash_api import (
    BOUND,
    DEVICES,
    OPTIONS,
    assert_ours,
    assert_right,
    defined,
    exact,
    no_plans,
    random,
)
from tests.runtime.api.test_flash_api import with_slopes as with_slopes_of

__all__ = ["no_plans"]  # a fixture of every test

SINKS = (-1.0, 0.5, 3.0, float("-inf"))
"""Of four heads: one that matters little, one that is a key among others, one that takes most, and one that is none."""


def sinks_on(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(SINKS, dtype=dtype, device=device)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, dim] and log-sum-exp [heads, rows], as if every row had one key more, whose value is 0."""
    own, sink = lse.exp(), sinks[:, None].exp()
    total = own + sink
    return out * (own / total).mT[..., None].nan_to_num(), total.log()


def of_one_sign(lse: Tensor) -> Tensor:
    """A gradient of the log-sum-exp. That of a sink is a sum over all rows, of which nothing is left but rounding where
    they cancel out."""
    return torch.rand_like(lse) + 0.5


def on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("lengths", [(17, 29), (29, 17), (64, 128)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_sinks_join_the_softmax(
    device: str, options: dict[str, Any], lengths: tuple[int, int], dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    options, sinks = with_slopes_of(options, 4, device), sinks_on(device).requires_grad_()
    q, k, v = (random(2, own, heads, 64, device=device) for own, heads in [(lengths[0], 4), *[(lengths[1], 2)] * 2])
    leaves = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in (q, k, v)]
    result = flash_attn_func(*leaves, **options, return_attn_probs=True, s_aux=sinks)
    out, lse = result[0], result[1]
    doubles, exact_sinks = exact(*leaves), sinks.detach().double().cpu().requires_grad_()
    parts = [
        with_sinks(*defined(*(own[entry] for own in doubles), **on_cpu(options)), exact_sinks) for entry in range(2)
    ]
    right, sums = (torch.stack(each) for each in zip(*parts, strict=True))
    assert_right(out, right, device)
    visible = ~sums.isneginf()
    assert torch.equal(lse.isneginf().cpu(), ~visible)
    assert_right(lse.cpu()[visible], sums[visible], device)
    grad, grad_lse = torch.randn_like(out), of_one_sign(lse).masked_fill(lse.isneginf(), 0.0)
    got = torch.autograd.grad((out, lse), [*leaves, sinks], (grad, grad_lse))
    wanted = torch.autograd.grad(
        (right, sums.masked_fill(~visible, 0.0)),
        [*doubles, exact_sinks],
        (grad.double().cpu(), grad_lse.double().cpu()),
    )
    for one, other in zip(got, wanted, strict=True):
        assert_right(one, other.nan_to_num(), device)
    assert_ours(device)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_log_sum_exp_has_a_gradient(device: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = with_slopes_of(options, 4, device)
    leaves = [random(2, own, heads, 64, device=device).requires_grad_() for own, heads in ((40, 4), (70, 2), (70, 2))]
    result = flash_attn_func(*leaves, **options, return_attn_probs=True)
    doubles = exact(*leaves)
    right = torch.stack([defined(*(own[entry] for own in doubles), **on_cpu(options))[1] for entry in range(2)])
    grad = torch.randn_like(result[1])
    got = torch.autograd.grad(result[1], leaves, grad, materialize_grads=True)
    wanted = torch.autograd.grad(right, doubles, grad.double().cpu(), materialize_grads=True)
    for one, other in zip(got, wanted, strict=True):
        assert_right(one, other, device)
    assert not bool(got[2].any())
    assert_ours(device)


@pytest.mark.parametrize("sunk", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (9, 0)}])
@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences_have_both(device: str, options: dict[str, Any], sunk: bool) -> None:
    torch.manual_seed(0)
    lengths, more = ((7, 70, 19, 1), (11, 90, 40, 3)), (2, 3)
    sinks = sinks_on(device).requires_grad_() if sunk else None
    sizes = ((sum(lengths[0]) + more[0], 4), *((sum(lengths[1]) + more[1], 2),) * 2)
    leaves = [random(*size, 64, device=device).requires_grad_() for size in sizes]
    bounds = [torch.tensor([0, *own]).cumsum(0).to(torch.int32).to(device) for own in lengths]
    result = flash_attn_varlen_func(*leaves, *bounds, 70, 90, **options, return_attn_probs=True, s_aux=sinks)
    out, lse = result[0][: -more[0]], result[1][:, : -more[0]]
    assert not bool(result[0][-more[0] :].any())
    doubles = exact(*leaves)
    exact_sinks = sinks_on("cpu", torch.float64).requires_grad_()
    cuts = ([*lengths[0], more[0]], *([*lengths[1], more[1]],) * 2)
    parts = zip(*(own.split(cut) for own, cut in zip(doubles, cuts, strict=True)), strict=True)
    found = [defined(*own, **options) for own in list(parts)[:-1]]
    found = [with_sinks(*own, exact_sinks) for own in found] if sunk else found
    right, sums = torch.cat([one for one, _ in found]), torch.cat([one for _, one in found], 1)
    assert_right(out, right, device)
    assert_right(lse, sums, device)
    grads = torch.randn_like(out), of_one_sign(lse)
    inputs, exact_inputs = ([*leaves, sinks], [*doubles, exact_sinks]) if sunk else (leaves, doubles)
    got = torch.autograd.grad((out, lse), inputs, grads)  # type: ignore[arg-type]
    wanted = torch.autograd.grad((right, sums), exact_inputs, [own.double().cpu() for own in grads])
    for one, other in zip(got, wanted, strict=True):
        assert_right(one, other.nan_to_num(), device)
    assert_ours(device)


@pytest.mark.parametrize("splits", [0, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_decoding_over_a_cache_has_sinks(device: str, splits: int) -> None:
    torch.manual_seed(0)
    q, (k, v) = random(3, 2, 4, 64, device=device), (random(3, 300, 2, 64, device=device) for _ in range(2))
    lengths = torch.tensor([300, 0, 77], dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, num_splits=splits, s_aux=sinks_on(device), return_softmax_lse=True
    )
    for entry, length in enumerate(lengths.tolist()):
        own = (q[entry], k[entry, :length], v[entry, :length])
        right, sums = with_sinks(*defined(*exact(*own), causal=True), sinks_on("cpu", torch.float64))
        assert_right(out[entry], right, device)
        torch.testing.assert_close(lse[entry].double().cpu(), sums.detach(), atol=BOUND[device], rtol=BOUND[device])
    assert not bool(out[1].any())
    assert_ours(device)


@pytest.mark.parametrize("device", DEVICES)
def test_merged_parts_train_as_the_whole(device: str) -> None:
    torch.manual_seed(0)
    leaves = [random(1, own, heads, 64, device=device).requires_grad_() for own, heads in ((50, 4), (90, 2), (90, 2))]
    q, k, v = leaves
    shares = [flash_attn_func(q, k[:, own], v[:, own], return_attn_probs=True) for own in (slice(0, 30), slice(30, 90))]
    out, lse = merge_partial(*shares[0][:2], *shares[1][:2])
    doubles = exact(*leaves)
    right, sums = defined(*(own[0] for own in doubles))
    assert_right(out[0], right, device)
    grads = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, grads)
    wanted = torch.autograd.grad((right, sums), doubles, [own[0].double().cpu() for own in grads])
    for one, other in zip(got, wanted, strict=True):
        assert_right(one, other, device)
    assert_ours(device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_graph_has_both(device: str) -> None:
    torch.manual_seed(0)
    leaves = [random(1, own, heads, 64, device=device).requires_grad_() for own, heads in ((50, 4), (90, 2), (90, 2))]
    leaves.append(sinks_on(device)[:4].clamp(min=-2.0).requires_grad_())

    def results(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=sinks)  # type: ignore[misc]
        return out, lse

    eager = results(*leaves)
    compiled = torch.compile(results, backend="aot_eager", fullgraph=True)(*leaves)
    grads = [torch.randn_like(own) for own in eager]
    pairs = [(eager, compiled)]
    pairs += [(torch.autograd.grad(own, leaves, grads) for own in (eager, compiled))]  # type: ignore[list-item]
    for wanted, found in pairs:
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other, one, atol=BOUND[device], rtol=BOUND[device])


def test_sinks_alone_may_require_a_gradient() -> None:
    q, k, v = torch.randn(1, 6, 4, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    sinks = torch.zeros(4, requires_grad=True)
    flash_attn_func(q, k, v, s_aux=sinks).sum().backward()
    assert sinks.grad is not None
    assert bool(sinks.grad.any())


Q, KV = torch.zeros(1, 5, 4, 16), torch.zeros(1, 7, 2, 16)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [(UsageError, torch.zeros(2)), (UsageError, torch.zeros(4).long()), (WrongTypeError, [0.0] * 4)],
)
def test_wrong_sinks_are_refused(error: type[Exception], wrong: Any) -> None:
    with pytest.raises(error, match="`s_aux` must be"):
        flash_attn_func(Q, KV, KV, s_aux=wrong)
    with pytest.raises(error, match="`s_aux` must be"):
        flash_attn_with_kvcache(Q, KV, KV, s_aux=wrong)
