"""Launches of calls with features, log-sum-exp or gradients, and the autograd function around two of them.

Forward and backward have plans of their own: both directions are looked up, tuned and stored apart. Nothing of the size
of the scores is kept: the backward computes them again from query, key and log-sum-exp (FlashAttention, arXiv
2205.14135, section 3.1), and dropped pairs from the seed.
"""

from collections.abc import Sequence
from copy import copy
from functools import partial
from operator import is_not
from typing import Any, Protocol

import torch
from torch import Tensor, is_grad_enabled

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.dispatch.call import EXTRA_TENSORS, Call
from blocktune.kernels.dispatch.launches.layout import Layout
from blocktune.kernels.dispatch.launches.memory_layout import dense
from blocktune.kernels.dispatch.launches.plans import KernelPlan
from blocktune.kernels.dispatch.launches.recorded import CHANCES, MAX_LAYOUTS, Backward, Forward
from blocktune.kernels.dispatch.launches.results import new_gradients
from blocktune.kernels.portable.sinks.results import gradient_of_sinks
from blocktune.kernels.values.block_mask import BlockMask
from blocktune.kernels.values.dropout import drawn_words
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.feature_tensors import Extras

OfCall = tuple[BlockMask | None, int, int]
"""What of a call is no tensor and no option: its block mask, seed and offset."""

NOTHING: OfCall = None, 0, 0

OF_THE_THREE = True, True, True, False, False
"""Which inputs of `Attention` need a gradient in most calls: query, key and value."""

OFFSET_STEP = 4
"""By how much a call with dropout moves the generator on; PyTorch wants multiples of 4."""


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

    __slots__ = (
        "_again", "_backwards", "_extras", "_names", "_numbers", "_repeats", "_sinks", "ahead", "backward", "drops",
        "forward", "layout", "lse", "scale",
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
        self.forward, self.backward = forward, backward
        self.lse, self.ahead = lse, ahead
        given = zip(EXTRA_TENSORS, call.tensors, strict=True)
        self._names = tuple(name for name, tensor in given if tensor is not None)
        self._sinks = self._names.index("sinks") if "sinks" in self._names else None
        self._numbers = call.extras.softcap, call.extras.dropout_p
        changes = self._names or self.drops or call.extras.block_mask is not None
        self._extras = None if changes else call.extras  # what is the same in every call; tensors are not kept
        self._repeats = call.extras.block_mask is None
        self._lay_out(layout)

    def laid_out(self, layout: Layout, ahead: Launch | None = None) -> "Served":
        """Return the same calls with tensors of another layout, and with a launch ahead of them."""
        other = copy(self)
        other.ahead = ahead
        other._lay_out(layout)
        return other

    def _lay_out(self, layout: Layout) -> None:
        self.layout = layout
        self._again = Forward(self.forward, CHANCES if self._repeats else 0)
        self._backwards: tuple[Backward, ...] = ()

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor, block_mask: BlockMask | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self.drops:
            drawn: OfCall = block_mask, *draw(query.device)
        else:
            drawn = NOTHING if block_mask is None else (block_mask, 0, 0)
        if self.backward is None:
            return self.run(query, key, value, tensors, drawn)
        return attended(self, query, key, value, tensors, drawn)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], of_call: OfCall
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and log-sum-exp without autograd."""
        replay = self._again.known
        if replay is not None:
            words = drawn_words(*of_call[1:]) if self.drops else ()
            return self._again.again(replay, (query, key, value), tensors, words)
        extras, plan = self.extras_of(tensors, *of_call), self.forward
        q, k, v = self.layout.inside(query, key, value)
        out, lse = plan.new_results(q, v)
        start = partial(plan.start_forward, q, k, v, out, lse, self.scale, extras)
        outside = self.layout.outside(out)
        replay = self._again.launch(start, (q, k, v, out, *tensors, lse))
        if replay is not None:
            self._again.learn(replay, outside, lse, packed=plan.is_packed)
        return outside, lse

    def gradients(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, of_call: OfCall = NOTHING
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value.

        Args:
            saved: query, key, value, output, log-sum-exp and the tensors of the call.
            grad, grad_lse: the gradients of output and log-sum-exp.
        """
        if grad_lse is None and type(grad) is Tensor and not grad.is_nested:
            words = drawn_words(*of_call[1:]) if self.drops else ()
            for again in self._backwards:
                found = again.again((*saved, grad), words)
                if found is not None:
                    return found
        return self._gradients_of(saved, grad, grad_lse, of_call)

    def sinks_of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the sinks among the tensors of one of the calls, if there are any."""
        return None if self._sinks is None else tensors[self._sinks]

    def _gradients_of(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, of_call: OfCall
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value by the slow path, which is recorded if it can be repeated."""
        plan = self.backward
        assert plan is not None  # or autograd would not have recorded the call
        *inputs, dout = self.layout.inside(*saved[:4], grad)
        given = *inputs, *saved[5:], saved[4]
        planned = *plan.as_planned(*given[:-1]), dense(saved[4])
        (q, k, v, out, *tensors, lse), is_restored = planned, any(map(is_not, planned, given))
        extras = self.extras_of(tensors, *of_call).with_grad_lse(grad_lse)
        known = id(grad) in map(id, saved)  # in this call, and in no other
        once = not self._repeats or self._sinks is not None or grad_lse is not None or is_restored
        if once or known or len(self._backwards) == MAX_LAYOUTS:
            return self.layout.all_outside(plan.backward(q, k, v, out, lse, dout, self.scale, extras))
        gradients = new_gradients(q, k, v, packed=plan.is_packed)
        start = partial(plan.start_backward, q, k, v, out, lse, dout, gradients, self.scale, extras)
        made, outside = Backward(plan, (*saved, grad)), self.layout.all_outside(gradients)
        replay = made.launch(start, (q, k, v, out, lse, *tensors, dout, *gradients))
        if replay is not None:
            made.learn(replay, outside, packed=plan.is_packed)
        self._backwards = (made, *self._backwards)
        return outside

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


class Serving(Protocol):
    """What computes calls of a kind: `Served`, or the ops of a graph."""

    lse: bool
    layout: Layout

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], of_call: OfCall
    ) -> tuple[Tensor, Tensor | None]: ...

    def gradients(
        self, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, of_call: OfCall
    ) -> tuple[Tensor, ...]: ...

    def sinks_of(self, tensors: Sequence[Tensor]) -> Tensor | None: ...


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """Output of a call, and log-sum-exp if it is wanted, by the plan of either direction. The gradients have none
    themselves.

    The sinks are those of the extras, named apart since they may require a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        call: tuple[Serving, tuple[Tensor, ...], OfCall],
    ) -> Any:
        del sinks
        served, tensors, of_call = call
        out, lse = served.run(query, key, value, tensors, of_call)
        ctx.save_for_backward(query, key, value, out, lse, *tensors)
        ctx.call = served, of_call
        if not served.lse:
            return out  # there is a gradient of it whenever the backward runs
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
        if ctx.needs_input_grad == OF_THE_THREE and grad_lse is None and grad is not None and not is_grad_enabled():
            served, of_call = ctx.call
            return *served.gradients(ctx.saved_tensors, grad, None, of_call), None, None
        if grad is None and grad_lse is None:
            return (None,) * 5
        if not is_grad_enabled():
            gradients = _gradients(ctx, grad, grad_lse)
        else:  # the caller wants second derivatives, which would be zeros
            with torch.no_grad():
                gradients = _gradients(ctx, grad, grad_lse)
            gradients = FinalGradients.apply(*(one.requires_grad_() for one in gradients))
        needs_query, needs_key, needs_value, *_ = ctx.needs_input_grad
        dq, dk, dv, *of_sinks = gradients
        inputs = dq if needs_query else None, dk if needs_key else None, dv if needs_value else None
        return *inputs, *(of_sinks or (None,)), None


_apply = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without its look at functorch, which is not active where a plan serves a call."""


def attended(
    served: Serving, query: Tensor, key: Tensor, value: Tensor, tensors: tuple[Tensor, ...], of_call: OfCall
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if it is wanted, the log-sum-exp, differentiable both."""
    found = _apply(query, key, value, served.sinks_of(tensors), (served, tensors, of_call))
    return found if served.lse else (found, None)


def _gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, and of sinks if they need one."""
    served: Serving
    served, of_call = ctx.call
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    gradients = served.gradients(saved, grad, grad_lse, of_call)
    if not ctx.needs_input_grad[3]:
        return gradients
    out, dout = served.layout.inside(saved[3], grad)
    return *gradients, gradient_of_sinks(out, saved[4], dout, grad_lse, served.sinks_of(saved[5:]))


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
