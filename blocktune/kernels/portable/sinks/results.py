"""Attention sinks around a call: by kernels where kernels run, else by PyTorch (rows.py says what they are)."""

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.values.feature_tensors import Extras


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [batch, num_heads, rows, head_dim_v] and log-sum-exp [..., num_heads, rows] with sinks
    [num_heads], in new tensors. Differentiable; the weights are computed in the log-sum-exp's type."""
    sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
    empty = lse.isneginf() & sink.isneginf()
    own, sink = lse.masked_fill(empty, 0.0), sink.masked_fill(empty, 0.0)  # -inf minus -inf is no number
    merged = torch.logaddexp(own, sink)
    return (out.to(lse.dtype) * (own - merged).exp()[..., None]).to(out.dtype), merged.masked_fill(empty, -torch.inf)


def with_sink_pass(launch: Launch, *, takes_extras: bool) -> Launch:
    """Return the launch(q, k, v, out, lse, scale, extras) of a forward kernel that knows no sinks, and of a pass over
    its results that adds them. takes_extras: whether the kernel's own launch does."""

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, extras: Extras) -> None:
        launch(q, k, v, out, lse, scale, *((extras,) if takes_extras else ()))
        assert extras.sinks is not None
        _add(out, lse, extras.sinks)

    return run


def _add(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Write results again, with sinks."""
    if out.is_cuda:
        from blocktune.kernels.portable.sinks.rows import add_sinks

        add_sinks(out, lse, sinks)
    else:
        for memory, found in zip((out, lse), with_sinks(out, lse, sinks), strict=True):
            memory.copy_(found)


def before_sinks(grad: Tensor, lse: Tensor, extras: Extras) -> tuple[Tensor, Extras]:
    """Return the gradients of output and log-sum-exp as they were before the sinks, the latter in the extras: for
    kernels that find the statistics of float32 rows themselves, without the sinks."""
    assert extras.sinks is not None
    sink = extras.sinks.float()[:, None].expand_as(lse)
    share = -torch.expm1(torch.where(lse.isneginf(), -torch.inf, sink - lse))
    grad_lse = None if extras.grad_lse is None else extras.grad_lse * share
    return grad * share[..., None], extras.with_grad_lse(grad_lse)


def gradient_of_sinks(out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [num_heads], from results with them and their gradients."""
    if out.is_cuda and not torch.compiler.is_compiling() and type(out) is Tensor:
        from blocktune.kernels.portable.sinks.rows import sink_gradients

        rows = [
            rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (out, grad)
        ]  # a user's hooks restore any
        return sink_gradients(rows[0], lse.contiguous(), rows[1], grad_lse, sinks)
    delta = (out.float() * grad.float()).sum(-1).view_as(lse)
    delta = delta if grad_lse is None else delta - grad_lse
    sink = sinks.float()[:, None].expand_as(lse)
    share = torch.where(lse.isneginf(), -torch.inf, sink - lse).exp()
    found = -(share * delta).sum(-1)
    return (found if found.dim() == 1 else found.sum(0)).to(sinks.dtype)
