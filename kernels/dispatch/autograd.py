"""Launches of calls with features, log-sum-exp or gradients, and the autograd function around two of them.

Forward and backward have plans of their own: both directions are looked up, tuned and stored apart. Nothing of the size
of the scores is kept: the backward computes them again from query, key and log-sum-exp (FlashAttention, arXiv
2205.14135, section 3.1), and dropped pairs from the seed.
"""

from collections.abc import Sequence
from copy import copy
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.dispatch.call import EXTRA_TENSORS, Call
from blocktune.kernels.dispatch.plan import empty_output
from blocktune.kernels.portable.sinks.results import before_sinks, finished, gradient_of_sinks
from blocktune.kernels.selection.explanation import Explanation
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import Direction

OFFSET_STEP = 4
"""By how much a call with dropout moves the generator on; PyTorch wants multiples of 4."""


class GeneralPlan:
    """One of our kernels computes one direction of a call, with a config that is bound and was launched once."""

    __slots__ = ("_is_packed", "_sums", "_takes_extras", "calls", "explanation", "launch")

    def __init__(self, explanation: Explanation, launch: Launch, call: Call, direction: Direction, sums: bool) -> None:
        self.explanation = explanation
        self.launch = launch
        self.calls = 0
        self._sums = sums
        self._is_packed = call.features.varlen
        self._takes_extras = takes_extras(call, direction)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, extras: Extras
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the log-sum-exp if the plan is one with it."""
        self.calls += 1
        out, lse = new_results(query, value, packed=self._is_packed, sums=self._sums)
        if self._takes_extras:
            self.launch(query, key, value, out, lse, scale, extras)
        else:
            self.launch(query, key, value, out, lse, scale)
        if extras.sinks is None:
            return out, lse
        assert lse is not None  # the plan is one with log-sum-exp
        return finished(out, lse, extras.sinks)

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        scale: float,
        extras: Extras,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, laid out as these are."""
        self.calls += 1
        if extras.sinks is not None and query.dtype is torch.float32:
            grad, extras = before_sinks(grad, lse, extras)
        gradients = new_gradients(query, key, value, packed=self._is_packed)
        if self._takes_extras or extras.grad_lse is not None:
            self.launch(query, key, value, out, lse, grad, *gradients, scale, extras)
        else:
            self.launch(query, key, value, out, lse, grad, *gradients, scale)
        return gradients


def takes_extras(call: Call, direction: Direction) -> bool:
    """Return whether launches of such calls have a last argument: only shapes with features and numbers with scales
    do."""
    extras = call.extras
    scaled = not (extras.scale_q is None and extras.scale_k is None and extras.scale_v is None)
    return scaled or bool(call.features_of(direction))


def new_results(query: Tensor, value: Tensor, *, packed: bool, sums: bool) -> tuple[Tensor, Tensor | None]:
    """Return memory for the output, in the dimension order of the query, and for the log-sum-exp if it is wanted.

    The log-sum-exp is float32 [batch, num_heads, seqlen_q], or [num_heads, tokens] of packed sequences. No kernel
    writes outside all sequences, so there the output is 0 and the log-sum-exp -inf.
    """
    out = empty_output(query, value.shape[-1])
    if packed:
        out.zero_()
        return out, query.new_full(query.shape[1:3], float("-inf"), dtype=torch.float32) if sums else None
    return out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if sums else None


def new_gradients(query: Tensor, key: Tensor, value: Tensor, *, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the gradients: dense, in the dimension order of what they belong to; 0 outside packed
    sequences."""
    make = torch.zeros_like if packed else torch.empty_like
    return make(query), make(key), make(value)


class Layout(Enum):
    """Where an entry point's tensors have their dimensions. Plans have [batch, heads, length, dim]."""

    HEADS_FIRST = "[batch, heads, length, dim]"
    LENGTH_FIRST = "[batch, length, heads, dim]"
    PACKED = "[tokens, heads, dim]"

    def inside(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors as plans have them."""
        if self is Layout.HEADS_FIRST:
            return tensors
        if self is Layout.LENGTH_FIRST:
            return tuple([tensor.transpose(1, 2) for tensor in tensors])
        return tuple([tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors])

    def outside(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a plan as the entry point has it."""
        if self is Layout.HEADS_FIRST:
            return tensor
        return tensor.transpose(1, 2) if self is Layout.LENGTH_FIRST else tensor.squeeze(0).transpose(0, 1)


class Served:
    """Calls of one kind that our kernels compute: served(query, key, value, *tensors) returns output and log-sum-exp.

    The tensors are those of the kind's extras, in the order of `EXTRA_TENSORS`; a block mask comes by its name. The
    log-sum-exp is None unless it is wanted or there are gradients. Pairs to drop are drawn in every call.

    Args:
        call: one of them.
        forward: the plan.
        backward: that of the gradients, where they are needed.
        lse: whether the log-sum-exp is wanted.
        layout: of query, key, value and output.
        ahead: a launch that the entry point makes ahead of it.
    """

    __slots__ = ("_extras", "_names", "_numbers", "ahead", "backward", "drops", "forward", "layout", "lse", "scale")

    def __init__(
        self,
        call: Call,
        forward: GeneralPlan,
        backward: GeneralPlan | None,
        *,
        lse: bool,
        layout: Layout = Layout.HEADS_FIRST,
        ahead: Launch | None = None,
    ) -> None:
        self.scale, self.drops = call.scale, call.features.dropout
        self.forward, self.backward = forward, backward
        self.lse, self.layout, self.ahead = lse, layout, ahead
        given = zip(EXTRA_TENSORS, call.tensors, strict=True)
        self._names = tuple(name for name, tensor in given if tensor is not None)
        self._numbers = call.extras.softcap, call.extras.dropout_p
        changes = self._names or self.drops or call.extras.block_mask is not None
        self._extras = None if changes else call.extras  # what is the same in every call; tensors are not kept

    def laid_out(self, layout: Layout, ahead: Launch | None = None) -> "Served":
        """Return the same calls with tensors of another layout, and with a launch ahead of them."""
        other = copy(self)
        other.layout, other.ahead = layout, ahead
        return other

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor, block_mask: BlockMask | None = None
    ) -> tuple[Tensor, Tensor | None]:
        extras = self._extras
        if extras is None:
            extras = self.extras_of(tensors, block_mask, *(draw(query.device) if self.drops else (0, 0)))
        if self.backward is None:
            return self.run(query, key, value, extras)
        found = _apply(query, key, value, extras.sinks, self, extras)
        return found if self.lse else (found, None)

    def run(self, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> tuple[Tensor, Tensor | None]:
        """Return the output and log-sum-exp without autograd."""
        if self.layout is Layout.HEADS_FIRST:
            return self.forward.forward(query, key, value, self.scale, extras)
        query, key, value = self.layout.inside(query, key, value)
        out, lse = self.forward.forward(query, key, value, self.scale, extras)
        return self.layout.outside(out), lse

    def extras_of(
        self, tensors: Sequence[Tensor], block_mask: BlockMask | None = None, seed: int = 0, offset: int = 0
    ) -> Extras:
        """Return the extras of one of the calls."""
        if self._extras is not None:
            return self._extras
        named: dict[str, Any] = dict(zip(self._names, tensors, strict=True))
        softcap, dropout_p = self._numbers
        return Extras(**named, softcap=softcap, dropout_p=dropout_p, seed=seed, offset=offset, block_mask=block_mask)

    def tensors_of(self, extras: Extras) -> list[Tensor]:
        """Return the tensors among the extras of one of the calls."""
        return [getattr(extras, name) for name in self._names]


def draw(device: torch.device) -> tuple[int, int]:
    """Return a seed and an offset from PyTorch's generator of the device, which moves on.

    On a GPU they are the generator's seed and its offset, so that nothing waits for the GPU; `torch.manual_seed` and
    the states that activation checkpointing keeps and restores decide both.
    """
    if device.type != "cuda":
        seed, offset = torch.randint(2**62, (2,)).tolist()
        return seed, offset
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + OFFSET_STEP)
    return generator.initial_seed() & (2**64 - 1), offset


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """Output of a call, and log-sum-exp if it is wanted, by the plan of either direction. The gradients have none
    themselves.

    The sinks are those of the extras, named apart since they may require a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, served: Served, extras: Extras
    ) -> Any:
        del sinks
        out, lse = served.run(query, key, value, extras)
        ctx.save_for_backward(query, key, value, out, lse, *served.tensors_of(extras))
        ctx.served, ctx.of_call = served, (extras.block_mask, extras.seed, extras.offset)
        ctx.set_materialize_grads(False)
        return (out, lse) if served.lse else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 6
        if not torch.is_grad_enabled():
            gradients = _gradients(ctx, grad, grad_lse)
        else:  # the caller wants second derivatives, which would be zeros
            with torch.no_grad():
                gradients = _gradients(ctx, grad, grad_lse)
            gradients = FinalGradients.apply(*(one.requires_grad_() for one in gradients))
        needs_query, needs_key, needs_value, *_ = ctx.needs_input_grad
        dq, dk, dv, *of_sinks = gradients
        inputs = dq if needs_query else None, dk if needs_key else None, dv if needs_value else None
        return *inputs, *(of_sinks or (None,)), None, None


_apply = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without its look at functorch, which is not active where a plan serves a call."""


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, and of sinks if they need one."""
    served: Served = ctx.served
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    plan, extras = served.backward, served.extras_of(tensors, *ctx.of_call).with_grad_lse(grad_lse)
    assert plan is not None  # or autograd would not have recorded the call
    grad = torch.zeros_like(out) if grad is None else grad
    if served.layout is not Layout.HEADS_FIRST:
        query, key, value, out, grad = served.layout.inside(query, key, value, out, grad)
    gradients: tuple[Tensor, ...] = plan.backward(query, key, value, out, lse, grad, served.scale, extras)
    if served.layout is not Layout.HEADS_FIRST:
        gradients = tuple([served.layout.outside(one) for one in gradients])
    if ctx.needs_input_grad[3]:
        gradients += (gradient_of_sinks(out, lse, grad, grad_lse, extras.sinks),)
    return gradients


class FinalGradients(torch.autograd.Function):  # type: ignore[misc]
    """The gradients themselves, which refuse to be differentiated. They depend on query, key and value even where what
    they were made from does not require a gradient, so that `once_differentiable` would let some of them pass."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return tuple(one.view_as(one) for one in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Compute the gradients.

        Raises:
            UsageError: always.
        """
        del ctx, grads
        raise UsageError(
            "Attention can be differentiated once, but a gradient of its gradients is requested. Take "
            "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH for second derivatives."
        )
