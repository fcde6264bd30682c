"""Launches of calls with features, log-sum-exp or gradients, and the autograd function around two of them.

Forward and backward have plans of their own: both directions are looked up, tuned and stored apart. Nothing of the size
of the scores is kept: the backward computes them again from query, key and log-sum-exp (FlashAttention, arXiv
2205.14135, section 3.1), and dropped pairs from the seed.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from operator import is_not
from typing import Any, Protocol

import torch
from torch import Tensor, is_grad_enabled

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.portable.sinks.results import gradient_of_sinks
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.dropout import drawn_words
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import NO_EXTRAS, Extras
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.dispatch.call import EXTRA_TENSORS, Call
from blocktune.runtime.dispatch.launches.launch_replays import CHANCES, MAX_LAYOUTS, BackwardReplay, ForwardReplay
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.launches.memory_layout import dense
from blocktune.runtime.dispatch.launches.plans import KernelPlan
from blocktune.runtime.dispatch.launches.results import new_gradients
from blocktune.runtime.dispatch.sdpa_arguments import mask_of_scores

CallValues = tuple[BlockMask | None, int, int]
"""Per-call values besides tensors and options: block mask, dropout seed, dropout offset."""

NO_VALUES: CallValues = None, 0, 0

QKV_GRADIENTS = True, True, True, False, False, False
"""`needs_input_grad` of most calls of `Attention`: query, key and value need a gradient."""

OFFSET_STEP = 4
"""By how much a call with dropout moves the generator on; PyTorch wants multiples of 4."""


class KernelCall:
    """Compute calls of one kind by our kernels: bound(query, key, value, *tensors) returns output and log-sum-exp.

    The tensors are those of the kind's extras, in the order of `EXTRA_TENSORS`, a mask as the entry point got it; a
    block mask comes by its name. The log-sum-exp is None unless it is wanted or there are gradients. Pairs to drop are
    drawn in every call.

    Args:
        call: one of them.
        forward: the plan.
        backward: that of the gradients, where they are needed.
        lse: whether the log-sum-exp is wanted.
        layout: of query, key, value and output.
        ahead: a launch that the entry point makes ahead of it.
    """

    __slots__ = (
        "_backward_replays",
        "_call",
        "_extras",
        "_forward_replay",
        "_mask",
        "_names",
        "_numbers",
        "_repeats",
        "_sinks",
        "ahead",
        "backward",
        "drops",
        "forward",
        "layout",
        "lse",
        "scale",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        forward: KernelPlan,
        backward: KernelPlan | None,
        *,
        lse: bool,
        layout: Layout = Layout.HEADS_FIRST,
        ahead: Launch | None = None,
    ) -> None:
        self.scale, self.drops = call.scale, call.features.dropout
        self._call = replace(call, extras=NO_EXTRAS)  # tensors are not kept
        self.forward, self.backward = forward, backward
        self.lse, self.ahead = lse, ahead
        given = zip(EXTRA_TENSORS, call.tensors, strict=True)
        self._names = tuple(name for name, tensor in given if tensor is not None)
        self._sinks = self._names.index("sinks") if "sinks" in self._names else None
        mask = call.extras.mask
        self._mask = None if mask is None else (self._names.index("mask"), mask.shape[3])
        self._numbers = call.extras.softcap, call.extras.dropout_p
        changes = self._names or self.drops or call.extras.block_mask is not None
        self._extras = None if changes else call.extras  # what is the same in every call; tensors are not kept
        self._repeats = call.extras.block_mask is None
        self._lay_out(layout)

    def with_layout(self, layout: Layout, ahead: Launch | None = None) -> "KernelCall":
        """Return the same calls with tensors of another layout, and with a launch ahead of them."""
        other = copy(self)
        other.ahead = ahead
        other._lay_out(layout)
        return other

    def _lay_out(self, layout: Layout) -> None:
        self.layout = layout
        self._forward_replay = ForwardReplay(self.forward, CHANCES if self._repeats else 0)
        self._backward_replays: tuple[BackwardReplay, ...] = ()

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor, block_mask: BlockMask | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self.drops:
            drawn: CallValues = block_mask, *draw(query.device)
        else:
            drawn = NO_VALUES if block_mask is None else (block_mask, 0, 0)
        if self.backward is None:
            return self.run(query, key, value, tensors, drawn)
        sinks = None if self._sinks is None else tensors[self._sinks]
        if self._mask is not None:  # checkpoints compare what is saved with that of the first call
            tensors = self._with_whole_mask(tensors)
        bias = self.bias_of(tensors)
        found = _apply(query, key, value, sinks, bias, (self, tensors, drawn))  # `apply_autograd`, without a call of it
        return found if self.lse else (found, None)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], call_values: CallValues
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and log-sum-exp without autograd."""
        words = drawn_words(*call_values[1:]) if self.drops else ()
        repeated = self._forward_replay.replay((query, key, value), tensors, words)
        if repeated is not None:
            return repeated
        tensors = self._with_whole_mask(tensors)
        extras, plan = self.extras_of(tensors, *call_values), self.forward
        q, k, v = self.layout.to_heads_first(query, key, value)
        out, lse = plan.new_results(q, v)
        start = partial(plan.start_forward, q, k, v, out, lse, self.scale, extras)
        outside = self.layout.from_heads_first(out)
        replay = self._forward_replay.launch(start, (q, k, v, out, *tensors, lse))
        if replay is not None:
            self._forward_replay.learn(replay, outside, lse, packed=plan.is_packed)
        return outside, lse

    def gradients(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call_values: CallValues = NO_VALUES
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value.

        Args:
            saved: query, key, value, output, log-sum-exp and the tensors of the call.
            grad, grad_lse: the gradients of output and log-sum-exp.
        """
        if grad_lse is None and type(grad) is Tensor and not grad.is_nested:
            words = drawn_words(*call_values[1:]) if self.drops else ()
            for again in self._backward_replays:
                found = again.replay((*saved, grad), words)
                if found is not None:
                    return found
        return self._gradients_of(saved, grad, grad_lse, call_values)

    def sinks_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the sinks among the tensors of one of the calls, if there are any."""
        return None if self._sinks is None else tensors[self._sinks]

    def bias_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the mask among the tensors of one of the calls, if there is one."""
        return None if self._mask is None else tensors[self._mask[0]]

    def gradient_of_bias(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call_values: CallValues
    ) -> Tensor:
        """Return the gradient of the additive mask. The arguments are those of `gradients`."""
        from blocktune.kernels.portable.backward.bias import bias_gradient

        tensors = self.layout.to_heads_first(*saved[:4], grad)
        q, k, v, out, dout = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in tensors)
        extras = self.extras_of(self._with_whole_mask(saved[5:]), *call_values).with_grad_lse(grad_lse)
        shape = self._call.shape(q, k, v, Direction.BACKWARD)
        found: Tensor = bias_gradient(shape, q, k, v, out, dense(saved[4]), dout, self.scale, extras)
        return found

    def _gradients_of(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call_values: CallValues
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value by the slow path, which is recorded if it can be repeated."""
        plan = self.backward
        assert plan is not None  # or autograd would not have recorded the call
        *inputs, dout = self.layout.to_heads_first(*saved[:4], grad)
        given = *inputs, *self._with_whole_mask(saved[5:]), saved[4]
        planned = *plan.as_planned(*given[:-1]), dense(saved[4])
        (q, k, v, out, *tensors, lse), is_restored = planned, any(map(is_not, planned, given))
        extras = self.extras_of(tensors, *call_values).with_grad_lse(grad_lse)
        known = id(grad) in map(id, saved)  # in this call, and in no other
        once = not self._repeats or self._sinks is not None or grad_lse is not None or is_restored
        if once or known or len(self._backward_replays) == MAX_LAYOUTS:
            return self.layout.all_from_heads_first(plan.backward(q, k, v, out, lse, dout, self.scale, extras))
        gradients = new_gradients(q, k, v, packed=plan.is_packed)
        start = partial(plan.start_backward, q, k, v, out, lse, dout, gradients, self.scale, extras)
        made, outside = BackwardReplay(plan, (*saved, grad)), self.layout.all_from_heads_first(gradients)
        replay = made.launch(start, (q, k, v, out, lse, *tensors, dout, *gradients))
        if replay is not None:
            made.learn(replay, outside, packed=plan.is_packed)
        self._backward_replays = (made, *self._backward_replays)
        return outside

    def _with_whole_mask(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of one of the calls with a mask [batch or 1, heads or 1, seqlen_q or 1, seqlen_k]. A
        replay needs its address alone."""
        if self._mask is None:
            return tuple(tensors)
        place, seqlen_k = self._mask
        return *tensors[:place], mask_of_scores(tensors[place], seqlen_k), *tensors[place + 1 :]

    def extras_of(
        self, tensors: Sequence[Tensor], block_mask: BlockMask | None = None, seed: int = 0, offset: int = 0
    ) -> Extras:
        """Return the extras of one of the calls."""
        if self._extras is not None:
            return self._extras
        named: dict[str, Any] = dict(zip(self._names, tensors, strict=True))
        softcap, dropout_p = self._numbers
        return Extras(**named, softcap=softcap, dropout_p=dropout_p, seed=seed, offset=offset, block_mask=block_mask)


def draw(device: torch.device) -> tuple[int, int]:
    """Return a seed and an offset from PyTorch's generator of the device, which moves on.

    On a GPU they are the generator's seed and its offset, so that nothing waits for the GPU; `torch.manual_seed` and
    the states that activation checkpointing keeps and restores decide both.
    """
    if device.type != "cuda":
        seed, offset = torch.randint(2**62, (2,), device="cpu").tolist()
        return seed, offset
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + OFFSET_STEP)
    return generator.initial_seed() & (2**64 - 1), offset


class DifferentiableCall(Protocol):
    """The computation for one kind of calls: `KernelCall`, or the ops of a graph."""

    lse: bool
    layout: Layout

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], call_values: CallValues
    ) -> tuple[Tensor, Tensor | None]: ...

    def gradients(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call_values: CallValues
    ) -> tuple[Tensor, ...]: ...

    def sinks_of(self, tensors: Sequence[Tensor]) -> Tensor | None: ...

    def bias_of(self, tensors: Sequence[Tensor]) -> Tensor | None: ...

    def gradient_of_bias(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call_values: CallValues
    ) -> Tensor: ...


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """A call's output, and log-sum-exp if it is wanted, by the plans of both directions. The gradients have none
    themselves.

    Sinks and bias (the mask) are those of the extras, named apart since they may require a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        call: tuple[DifferentiableCall, tuple[Tensor, ...], CallValues],
    ) -> Any:
        del sinks, bias
        bound, tensors, call_values = call
        out, lse = bound.run(query, key, value, tensors, call_values)
        ctx.save_for_backward(query, key, value, out, lse, *tensors)
        ctx.call = bound, call_values
        if not bound.lse:
            return out  # there is a gradient of it whenever the backward runs
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
        if ctx.needs_input_grad == QKV_GRADIENTS and grad_lse is None and grad is not None and not is_grad_enabled():
            bound, call_values = ctx.call
            return *bound.gradients(ctx.saved_tensors, grad, None, call_values), None, None, None
        if grad is None and grad_lse is None:
            return (None,) * 6
        if not is_grad_enabled():
            gradients = _gradients(ctx, grad, grad_lse)
        else:  # the caller wants second derivatives, which would be zeros
            with torch.no_grad():
                gradients = _gradients(ctx, grad, grad_lse)
            gradients = FinalGradients.apply(*(one.requires_grad_() for one in gradients))
        given = iter(gradients)
        found = [next(given) if place < 3 or needed else None for place, needed in enumerate(ctx.needs_input_grad)]
        return tuple(one if needed else None for one, needed in zip(found, ctx.needs_input_grad, strict=True))


_apply = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without its look at functorch, which is not active where a plan serves a call."""


def apply_autograd(
    bound: DifferentiableCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: tuple[Tensor, ...],
    call_values: CallValues,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if it is wanted, the log-sum-exp, differentiable both."""
    sinks, bias = bound.sinks_of(tensors), bound.bias_of(tensors)
    found = _apply(query, key, value, sinks, bias, (bound, tensors, call_values))
    return found if bound.lse else (found, None)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, and of sinks and bias if they need one."""
    bound: DifferentiableCall
    bound, call_values = ctx.call
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    gradients = bound.gradients(saved, grad, grad_lse, call_values)
    *_, needs_sinks, needs_bias, _ = ctx.needs_input_grad
    if needs_sinks:
        out, dout = bound.layout.to_heads_first(saved[3], grad)
        of_sinks = gradient_of_sinks(out, saved[4], dout, grad_lse, bound.sinks_of(saved[5:]))
        gradients = *gradients, of_sinks
    if needs_bias:
        gradients = *gradients, bound.gradient_of_bias(saved, grad, grad_lse, call_values)
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
            "Attention is differentiable once, but a second derivative is requested. Use "
            "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH for second derivatives."
        )
