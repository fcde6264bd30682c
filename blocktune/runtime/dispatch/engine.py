"""From a call to a plan for each direction, or to PyTorch, and autograd around.

`Dispatcher` adds the signature of PyTorch's attention to this.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.values.errors import BlocktuneError
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.dispatch.autograd import KernelCall, draw
from blocktune.runtime.dispatch.call import EXTRA_TENSORS, Call, PlanUse
from blocktune.runtime.dispatch.call_checks import check_capture, check_values
from blocktune.runtime.dispatch.fast_path import BoundCall, FastPath
from blocktune.runtime.dispatch.graphs import attend as graphs
from blocktune.runtime.dispatch.graphs.engines import Remember, register_engine
from blocktune.runtime.dispatch.launches.dtensors import BLOCKS, attend_locally, is_distributed, refuse_distributed
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.launches.padding import PaddedCall, Padding, copies_of_kind, padding_of
from blocktune.runtime.dispatch.launches.plans import KernelPlan, TorchPlan
from blocktune.runtime.dispatch.launches.results import empty_output, permute_like, with_strides_of
from blocktune.runtime.dispatch.obstacles import (
    call_obstacle,
    is_capturing,
    is_short_cache,
    is_symbolic,
    needs_gradients,
)
from blocktune.runtime.dispatch.resolver import MAX_PLANS
from blocktune.runtime.dispatch.sdpa_arguments import autocast_tensors, with_positive_scale
from blocktune.runtime.dispatch.sourced_engine import SourcedEngine
from blocktune.runtime.dispatch.torch_math import (
    is_sdpa_call,
    mathematics,
    mathematics_gradient_of_bias,
    mathematics_gradients,
)
from blocktune.runtime.store_reader.sources import ConfigSource

Plans = tuple[KernelPlan, KernelPlan | None]
"""Of the forward, and of the backward if a gradient is needed."""

Results = tuple[Tensor, Tensor | None]
"""Output and log-sum-exp."""


class NotServedError(BlocktuneError):
    """None of our kernels serves a call that is to be theirs alone."""


class Engine(SourcedEngine):
    """Plans for calls from the configs of a source. The arguments are those of `Dispatcher`."""

    def __init__(self, source: ConfigSource | None = None, *, strict: bool = False) -> None:
        super().__init__(source, strict=strict)
        self._number = register_engine(self)  # by which compiled graphs name it

    def find_call(self, options: tuple[Any, ...], *tensors: Tensor | None) -> KernelCall | None:
        """Return what serves a call with these options and tensors, if such a call was made before (`attend`)."""
        bound = self._resolver.fast_path.find(options, tensors)
        return bound if isinstance(bound, KernelCall) else None

    def find_dense_call(self, options: tuple[Any, ...], *tensors: Tensor | None) -> KernelCall | PaddedCall | None:
        """Return what `find_call` returns, or what serves a call by copies of its tensors."""
        bound = self._resolver.fast_path.find(options, tensors)
        return bound if isinstance(bound, KernelCall | PaddedCall) else None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lse: bool = False,
        layout: Layout = Layout.HEADS_FIRST,
        remember: Remember | None = None,
        only_ours: bool = False,
        **arguments: Any,
    ) -> Results:
        """Return the output, laid out like the query, and the log-sum-exp, which without `lse` may be missing or wrong.
        Differentiable, both. Autocast converts as it does for PyTorch's attention.

        Args:
            layout: of the entry point's tensors. Autograd keeps those, as in calls by the fast path:
                checkpoints compare the two.
            remember: gets what serves the call, where our kernels do, to add it to the fast path.
            only_ours: PyTorch must not compute the call.
            arguments: the arguments of `Call.of`.

        Raises:
            NotServedError: only our kernels are allowed, and none serves the call.
            UsageError: values of the call point outside the tensors, or the call is new while a CUDA graph is captured.
        """
        if is_distributed(query):
            return self._attend_locally(query, key, value, lse, arguments)
        if arguments.get("cache_seqlens") is not None and is_short_cache(query, key):
            (query,) = autocast_tensors(query)  # the cache stays as it is
        else:
            query, key, value = autocast_tensors(query, key, value)
        is_changed = not arguments["scale"] > 0
        query, arguments["scale"] = with_positive_scale(query, arguments["scale"])
        if is_symbolic(query):
            return graphs.attend(query, key, value, dispatcher=self._number, lse=lse, **arguments)
        call = Call.of(**arguments).over(query, key)
        self.check(query, key, value, call)
        extras = call.extras
        is_slope_fixed = not needs_gradients(extras.alibi_slopes)  # our kernels compute no gradient of slopes
        if is_slope_fixed and call_obstacle(query, key, value, extras.mask, extras.dropout_p) is None:
            remember = None if is_changed else remember
            found = self.serve(query, key, value, call, lse=lse, layout=layout, remember=remember)
            if not isinstance(found, TorchPlan):
                return found
            found.calls += 1
        if only_ours:
            raise NotServedError("none of our kernels serves this call")
        # PyTorch's own attention draws the pairs to drop itself, when a graph is replayed too
        if lse or not is_sdpa_call(query, key, call):
            if is_capturing(query):
                check_capture(call)
            call = with_new_seed(call, query.device)
        out, sums = mathematics(query, key, value, call, lse=lse)
        return permute_like(query, out), sums

    def _attend_locally(
        self, query: Tensor, key: Tensor, value: Tensor, lse: bool, arguments: dict[str, Any]
    ) -> Results:
        """Return `attend` of DTensors.

        Raises:
            UsageError: pairs are to be dropped.
        """
        if arguments.get("dropout_p"):
            refuse_distributed(query, "Attention with dropout")
        mask, sizes = arguments.pop("block_mask", None), arguments.pop("lengths", None)
        tensors = {name: arguments.pop(name, None) for name in EXTRA_TENSORS}

        def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Tensor | None = None, **own: Tensor) -> Results:
            own_mask = None if blocks is None else replace(mask, mask=blocks)
            own_sizes = sizes if sizes is None or "cu_seqlens_q" in own else (query.shape[0], *sizes[1:])
            others: dict[str, Any] = arguments | own
            out, sums = self.attend(query, key, value, lse=lse, block_mask=own_mask, lengths=own_sizes, **others)
            return out, sums if lse else None

        return attend_locally(attend, query, key, value, tensors | {BLOCKS: None if mask is None else mask.mask})

    def serve(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        lse: bool = False,
        layout: Layout = Layout.HEADS_FIRST,
        remember: Remember | None = None,
    ) -> Results | TorchPlan:
        """Return output and log-sum-exp by our kernels, with autograd around tensors of the layout, or why PyTorch
        computes the call, which has no `call_obstacle`."""
        padding = padding_of(query, value, call)
        if padding is not None and call.obstacle(query, key, value) is None:
            return self._serve_padded(padding, query, key, value, call, lse=lse, layout=layout, remember=remember)
        resolver, plans = self._resolver, self.plans(query, key, value, call, lse=lse)
        if isinstance(plans, TorchPlan):
            return plans
        forward, backward = plans
        bound = KernelCall(call, forward, backward, lse=lse, layout=layout)
        if remember is not None and _may_repeat(query, call):
            remember(resolver.fast_path, bound)
        if backward is None and not bound.drops:  # recorded when the next call comes by the fast path
            return forward.forward(query, key, value, call.scale, call.extras)
        tensors = (tensor for tensor in call.tensors if tensor is not None)
        outside = layout.all_from_heads_first((query, key, value))
        out, sums = bound(*outside, *tensors, block_mask=call.extras.block_mask)
        return *layout.to_heads_first(out), sums

    def _serve_padded(
        self,
        padding: Padding,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        lse: bool,
        layout: Layout,
        remember: Remember | None,
    ) -> Results | TorchPlan:
        """Return `serve` of copies with zeros."""
        resolver = self._resolver
        kind = (
            call.kind(query, key, value),
            needs_gradients(query, key, value, call.extras.sinks, call.extras.mask),
            lse,
        )
        if kind in resolver.unpadded:
            return resolver.unpadded[kind]

        def remember_padded(fast_path: FastPath, bound: BoundCall) -> None:
            if remember is not None:
                remember(fast_path, PaddedCall(bound, copies_of_kind(padding, query, key, value), layout))

        found = self.serve(*padding.copies(query, key, value), call, lse=lse, remember=remember_padded)
        if isinstance(found, TorchPlan):
            if not is_capturing(query):  # what fails in a capture holds there alone
                resolver.keep_unpadded(kind, found)
            return found
        return found[0][..., : value.shape[3]], found[1]

    def check(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> None:
        """Look at the values in the call's tensors: always on the CPU, on a GPU once for every kind of call.

        Raises:
            UsageError: lengths or tables of the call point outside the tensors.
        """
        if call.lengths is None or is_symbolic(query) or is_distributed(query):
            return
        if query.device.type == "cpu":
            check_values(query, key, call)
            return
        kind = call.kind(query, key, value)
        if kind in self._checked or is_capturing(query):
            return
        check_values(query, key, call)
        if len(self._checked) >= MAX_PLANS:
            self._checked.clear()
        self._checked.add(kind)

    def plans(self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, lse: bool = False) -> Plans | TorchPlan:
        """Return the plan of the forward, and of the backward where gradients are needed; or why PyTorch computes the
        call, which has no `call_obstacle`. lse: whether the log-sum-exp is wanted."""
        backward = None
        competes = not lse and is_sdpa_call(query, key, call)
        if needs_gradients(query, key, value, call.extras.sinks, call.extras.mask):
            use = PlanUse(sums=True, competes=competes)
            found = self.plan(query, key, value, call, Direction.BACKWARD, use)
            if isinstance(found, TorchPlan):
                return found
            backward = found
        sums = lse or backward is not None or call.extras.sinks is not None
        use = PlanUse(sums=sums, competes=competes)
        forward = self.plan(query, key, value, call, Direction.FORWARD, use)
        return forward if isinstance(forward, TorchPlan) else (forward, backward)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        lse: bool,
        sums: bool = True,
        remember: Remember | None = None,
    ) -> Results:
        """Return `attend` without autograd and with the call's own seed, for the ops of compiled graphs: the output has
        the strides of `empty_output` whoever computes it. sums: whether there is a log-sum-exp at all."""
        call, resolver = call.over(query, key), self._resolver
        self.check(query, key, value, call)
        use = PlanUse(sums=sums, competes=not sums and is_sdpa_call(query, key, call))
        plan = self.plan(query, key, value, call, Direction.FORWARD, use) if call.scale > 0 else None
        if isinstance(plan, KernelPlan):
            if remember is not None and _may_repeat(query, call):
                remember(resolver.fast_path, KernelCall(call, plan, None, lse=sums))
            return plan.forward(query, key, value, call.scale, call.extras)
        if plan is not None:
            plan.calls += 1
        out, lse_of_rows = mathematics(query, key, value, call, lse=lse or call.features.dropout)
        return with_strides_of(out, empty_output(query, value.shape[-1])), lse_of_rows

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        call: Call,
        *,
        grad_lse: Tensor | None = None,
        remember: Remember | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of `forward` but for that of sinks, laid out as `new_gradients` are whoever computes
        them. grad_lse: the gradient of the log-sum-exp, None for 0."""
        call, resolver = call.over(query, key), self._resolver
        plans = self._plans_of_both(query, key, value, call)
        if plans is not None:
            if remember is not None and _may_repeat(query, call):
                remember(resolver.fast_path, KernelCall(call, *plans, lse=True))
            extras = call.extras.with_grad_lse(grad_lse)
            return plans[1].backward(query, key, value, out, lse, grad, call.scale, extras)
        return mathematics_gradients(query, key, value, call, grad, grad_lse)

    def gradient_of_bias(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        call: Call,
        *,
        grad_lse: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of the additive mask of `forward`, contiguous."""
        call = call.over(query, key)
        plans = self._plans_of_both(query, key, value, call)
        if plans is None:
            return mathematics_gradient_of_bias(query, key, value, call, grad, grad_lse)
        tensors = [tensor for tensor in call.tensors if tensor is not None]
        call_values = call.extras.block_mask, call.extras.seed, call.extras.offset
        saved = query, key, value, out, lse, *tensors
        return KernelCall(call, *plans, lse=True).gradient_of_bias(saved, grad, grad_lse, call_values)

    def _plans_of_both(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> tuple[KernelPlan, KernelPlan] | None:
        """Return the plans of forward and backward, if our kernels compute both."""
        if not call.scale > 0:
            return None
        forward = self.plan(query, key, value, call, Direction.FORWARD)
        backward = self.plan(query, key, value, call, Direction.BACKWARD)
        if isinstance(forward, KernelPlan) and isinstance(backward, KernelPlan):
            return forward, backward
        return None


def with_new_seed(call: Call, device: torch.device) -> Call:
    """Return the call with a new seed; itself without dropout."""
    return call.with_seed(*draw(device)) if call.features.dropout else call


def _may_repeat(query: Tensor, call: Call) -> bool:
    """Return whether further calls of this kind go the same way: on the CPU each has its lengths looked at, and what a
    CUDA graph captures may come from earlier plans."""
    return (call.lengths is None or query.device.type != "cpu") and not is_capturing(query)
