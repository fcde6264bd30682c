"""The plan for one direction and kind of calls: a config that is bound and its results' memory; or PyTorch."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.portable.sinks.results import before_sinks
from blocktune.kernels.values.feature_tensors import Extras
from blocktune.kernels.values.shape import Direction
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.launches.memory_layout import copy_to_layout, fits_layout, is_given, memory_layout
from blocktune.runtime.dispatch.launches.results import new_gradients, new_results
from blocktune.runtime.dispatch.obstacles import is_capturing
from blocktune.runtime.dispatch.sdpa_arguments import SdpaArguments
from blocktune.runtime.dispatch.torch_attention import bind_sdpa, prepare_blas
from blocktune.runtime.selection.explanation import Explanation


class KernelPlan:
    """One of our kernels computes a call in one direction, with a config that is bound and was launched once."""

    __slots__ = ("_layouts", "_sums", "_takes_extras", "calls", "explanation", "is_packed", "launch")

    def __init__(
        self,
        explanation: Explanation,
        launch: Launch,
        call: Call,
        direction: Direction,
        sums: bool,
        inputs: Sequence[Tensor],
    ) -> None:
        self.explanation = explanation
        self.launch = launch
        self.calls = 0
        self._sums = sums
        self.is_packed = call.features.varlen
        self._layouts = tuple(map(memory_layout, (*inputs, *filter(is_given, call.tensors))))
        self._takes_extras = takes_extras(call, direction) or adds_sinks(call, direction)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, extras: Extras
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the log-sum-exp if the plan is one with it."""
        out, lse = self.new_results(query, value)
        self.start_forward(query, key, value, out, lse, scale, extras)
        return out, lse

    def as_planned(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return query, key, value, output and the tensors of the extras with the layout that the plan was made for:
        what a user's hooks have saved and restored may be laid out in any way."""
        return tuple(
            tensor if fits_layout(tensor, layout) else copy_to_layout(tensor, layout)
            for tensor, layout in zip(tensors, self._layouts, strict=True)
        )

    def new_results(self, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return memory for output and log-sum-exp."""
        return new_results(query, value, packed=self.is_packed, sums=self._sums)

    def start_forward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, scale: float, extras: Extras
    ) -> None:
        """Enqueue the kernels of the forward."""
        self.calls += 1
        if self._takes_extras:
            self.launch(query, key, value, out, lse, scale, extras)
        else:
            self.launch(query, key, value, out, lse, scale)

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
        if extras.sinks is not None and query.dtype is torch.float32:
            grad, extras = before_sinks(grad, lse, extras)
        gradients = new_gradients(query, key, value, packed=self.is_packed)
        self.start_backward(query, key, value, out, lse, grad, gradients, scale, extras)
        return gradients

    def start_backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor],
        scale: float,
        extras: Extras,
    ) -> None:
        """Enqueue the kernels of the backward."""
        self.calls += 1
        if self._takes_extras or extras.grad_lse is not None:
            self.launch(query, key, value, out, lse, grad, *gradients, scale, extras)
        else:
            self.launch(query, key, value, out, lse, grad, *gradients, scale)


class TorchPlan:
    """PyTorch computes the calls. `TorchCall` counts those of `attention`."""

    __slots__ = ("calls", "explanation")

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation
        self.calls = 0


Plan = KernelPlan | TorchPlan


class TorchCall:
    """Calls of one kind, served by PyTorch's attention: of query, key and value, and a mask where they have one.

    Args:
        plan: counts them.
        given: one of them; sizes, strides, types and alignment are those of all.
    """

    __slots__ = ("_attend", "_layout", "_plan")
    drops = False  # PyTorch draws the pairs itself

    def __init__(self, plan: TorchPlan, given: SdpaArguments) -> None:
        self._plan = plan
        self._attend = bind_sdpa(given)
        self._layout = Layout.HEADS_FIRST

    def with_layout(self, layout: Layout) -> "TorchCall":
        """Return the same calls with tensors of another layout."""
        other = copy(self)
        other._layout = layout
        return other

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> tuple[Tensor, None]:
        self._plan.calls += 1
        if is_capturing(query):
            prepare_blas(query.device)
        if self._layout is Layout.HEADS_FIRST:
            return self._attend(query, key, value, *mask), None
        query, key, value = self._layout.to_heads_first(query, key, value)
        return self._layout.from_heads_first(self._attend(query, key, value, *mask)), None


def adds_sinks(call: Call, direction: Direction) -> bool:
    """Return whether the results of such launches have sinks in them: then the extras are their last argument."""
    return direction is Direction.FORWARD and call.extras.sinks is not None


def takes_extras(call: Call, direction: Direction) -> bool:
    """Return whether a kernel's launches of such calls have a last argument without sinks: only shapes with features
    and numbers with scales do."""
    extras = call.extras
    scaled = not (extras.scale_q is None and extras.scale_k is None and extras.scale_v is None)
    return scaled or bool(call.features_of(direction))
