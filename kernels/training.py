"""Attention that is differentiated: a forward that keeps the log-sum-exp, and a backward with a config of its own.

The autograd function stands outside, around one forward and one backward launch of a `TrainingPlan`; both directions
are looked up, tuned and stored apart. Nothing of the size of the scores is kept: the backward computes them again from
query, key and log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blocktune.kernels.explanation import Explanation
from blocktune.kernels.kernel import Launch
from blocktune.kernels.plan import empty_output


class TrainingPlan:
    """Our kernels compute a call and its gradients, with configs that are bound and were launched once."""

    __slots__ = ("backward_explanation", "calls", "explanation", "head_dim_v", "launch", "launch_backward", "scale")

    def __init__(
        self,
        forward: tuple[Explanation, Launch],
        backward: tuple[Explanation, Launch],
        *,
        head_dim: int,
        head_dim_v: int,
    ) -> None:
        self.explanation, self.launch = forward
        self.backward_explanation, self.launch_backward = backward
        self.scale = head_dim**-0.5
        self.head_dim_v = head_dim_v
        self.calls = 0

    def run(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """The output, with `_Attention` as its place in the graph of gradients."""
        self.calls += 1
        out: Tensor = _Attention.apply(query, key, value, self, self.scale if scale is None else scale)
        return out

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp [batch, num_heads, seqlen_q]."""
        out = empty_output(query, self.head_dim_v)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        self.launch(query, key, value, out, lse, scale)
        return out, lse

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, laid out as these are."""
        gradients = new_gradients(query, key, value)
        self.launch_backward(query, key, value, out, lse, grad, *gradients, scale)
        return gradients


def new_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients: dense, in the dimension order of what they belong to."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """softmax(scale * query key^T) value with the gradients of a `TrainingPlan`. Its own gradients have none."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: TrainingPlan, scale: float) -> Tensor:
        out, lse = plan.forward(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients = ctx.plan.backward(*ctx.saved_tensors, grad, ctx.scale)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if wanted else None for gradient, wanted in needed), None, None
