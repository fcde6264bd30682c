"""One launch of a call with features, log-sum-exp or gradients, and the autograd function around two of them.

Forward and backward have plans of their own: both directions are looked up, tuned and stored apart. Nothing of the size
of the scores is kept: the backward computes them again from query, key and log-sum-exp (FlashAttention, arXiv
2205.14135, section 3.1), and dropped pairs from the seed.
"""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.dispatch.call import EXTRA_TENSORS, Call
from blocktune.kernels.dispatch.plan import empty_output
from blocktune.kernels.dispatch.sinks import before_sinks, finished, gradient_of_sinks
from blocktune.kernels.selection.explanation import Explanation
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import Direction


class GeneralPlan:
    """One of our kernels computes one direction of a call, with a config that is bound and was launched once."""

    __slots__ = ("calls", "explanation", "launch")

    def __init__(self, explanation: Explanation, launch: Launch) -> None:
        self.explanation = explanation
        self.launch = launch
        self.calls = 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp."""
        self.calls += 1
        out, lse = new_results(query, value, call)
        self.launch(query, key, value, out, lse, call.scale, *extras_of(call, Direction.FORWARD))
        return (out, lse) if call.extras.sinks is None else finished(out, lse, call.extras.sinks)

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, laid out as these are."""
        self.calls += 1
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # autograd may hand in one value for all
        if call.extras.sinks is not None and query.dtype is torch.float32:
            grad, call = before_sinks(grad, lse, call)
        gradients = new_gradients(query, key, value, call)
        extras = extras_of(call, Direction.BACKWARD)
        self.launch(query, key, value, out, lse, grad, *gradients, call.scale, *extras)
        return gradients


def extras_of(call: Call, direction: Direction) -> tuple[Any, ...]:
    """The last argument of a launch, which only shapes with features and numbers with scales have."""
    extras = call.extras
    scaled = not (extras.scale_q is None and extras.scale_k is None and extras.scale_v is None)
    return (extras,) if scaled or extras.grad_lse is not None or call.features_of(direction) else ()


def new_results(query: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return memory for the output, in the dimension order of the query, and for the log-sum-exp.

    The log-sum-exp is float32 [batch, num_heads, seqlen_q], or [num_heads, tokens] of packed sequences. No kernel
    writes outside all sequences, so there the output is 0 and the log-sum-exp -inf.
    """
    out = empty_output(query, value.shape[-1])
    if call.features.varlen:
        return out.zero_(), query.new_full(query.shape[1:3], float("-inf"), dtype=torch.float32)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def new_gradients(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients: dense, in the dimension order of what they belong to; 0 outside packed sequences."""
    make = torch.zeros_like if call.features.varlen else torch.empty_like
    return make(query), make(key), make(value)


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """Output and log-sum-exp of a call, by the plan of either direction. The gradients have none themselves.

    The sinks are those of the call, named apart since they may require a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        forward: GeneralPlan,
        backward: GeneralPlan,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        del sinks
        out, lse = forward.forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, out, lse, *call.tensors)
        ctx.plan, ctx.call = backward, call.with_tensors((None,) * len(EXTRA_TENSORS))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 7
        query, key, value, out, lse, *tensors = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        call = ctx.call.with_tensors(tensors)
        with torch.no_grad():
            gradients = ctx.plan.backward(query, key, value, out, lse, grad, call.with_grad_lse(grad_lse))
            if ctx.needs_input_grad[3]:
                gradients += (gradient_of_sinks(out, lse, grad, grad_lse, call.extras.sinks),)
        if torch.is_grad_enabled():  # the caller wants second derivatives, which would be zeros
            gradients = FinalGradients.apply(*(one.requires_grad_() for one in gradients))
        needed = zip_longest(gradients, ctx.needs_input_grad[:4])
        return *(gradient if wanted else None for gradient, wanted in needed), None, None, None


class FinalGradients(torch.autograd.Function):  # type: ignore[misc]
    """The gradients themselves, which refuse to be differentiated. They depend on query, key and value even where what
    they were made from does not require a gradient, so that `once_differentiable` would let some of them pass."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return tuple(one.view_as(one) for one in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Raises:
        UsageError: always.
        """
        del ctx, grads
        raise UsageError(
            "Attention can be differentiated once, but a gradient of its gradients is requested. Take "
            "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH for second derivatives."
        )
