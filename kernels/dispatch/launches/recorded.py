"""Calls of a kind whose launches are known: memory for the results, addresses, and the kernels again.

The first calls of a kind record what they launch (recording.py); the others make no views and look at no
size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.kernels.dispatch.guards import guard_of
from blocktune.kernels.dispatch.launches.general_plan import GeneralPlan
from blocktune.kernels.dispatch.launches.recording import Recording
from blocktune.kernels.dispatch.launches.replay import Replay, is_hooked
from blocktune.kernels.dispatch.plan import is_capturing
from blocktune.kernels.dispatch.torch_attention import ALIGNMENT_BYTES

CHANCES = 3
"""Launches that are recorded at most; on a stream that is new, for one, the first one fills what others find."""
MAX_LAYOUTS = 8
"""Layouts of gradients whose launches are recorded for a kind of call."""

New = Callable[[Tensor], Tensor]
"""Makes memory for a result, of a tensor that it may be like."""


class Recorded:
    """A launch of one kind, recorded until it can be repeated.

    Args:
        chances: launches that are recorded at most.
    """

    __slots__ = ("_chances", "_replay")

    def __init__(self, chances: int = CHANCES) -> None:
        self._chances = chances
        self._replay: Replay | None = None

    @property
    def known(self) -> Replay | None:
        """What repeats the launch, unless it is not known, or a profiler watches kernels."""
        replay = self._replay
        return None if replay is None or is_hooked(replay.runtime) else replay

    def launch(self, start: Callable[[], Any], inputs: Sequence[Tensor | None]) -> Replay | None:
        """Launch the ordinary way, and return what repeats it if this launch has shown that.

        Args:
            inputs: all tensors whose addresses the launch passes on.
        """
        first = inputs[0]
        if self._replay is not None or not self._chances or first is None or is_capturing(first):
            start()
            return None
        self._chances -= 1
        with Recording(inputs) as recording:
            start()
        return recording.replay()


class Repeating(Recorded):
    """launch(*tensors, number), repeated as soon as that is known; the number is the same in every call.

    Args:
        launch: the ordinary way.
    """

    __slots__ = ("_ordinary",)

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._ordinary = launch

    def __call__(self, *arguments: Any) -> None:
        given = [tensor for tensor in arguments[:-1] if tensor is not None]
        replay = self.known
        if replay is None:
            self._replay = self.launch(partial(self._ordinary, *arguments), given) or self._replay
        else:
            replay(*[tensor.data_ptr() for tensor in given])


def new_as(result: Tensor, like: Tensor, fill: float | None = None) -> New:
    """Return what makes memory with the sizes and strides of a result, filled with a number or not."""
    alike = torch.empty_like(like)
    if (alike.dtype, alike.shape, alike.stride()) == (result.dtype, result.shape, result.stride()) and not fill:
        same: New = torch.empty_like if fill is None else torch.zeros_like
        return same
    sizes, strides, dtype, device = result.shape, result.stride(), result.dtype, result.device

    def new(like: Tensor) -> Tensor:
        del like
        made = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        return made if fill is None else made.fill_(fill)

    return new


class Forward(Recorded):
    """The launch of the forward of calls of a kind, and what makes memory for its results."""

    __slots__ = ("_new_lse", "_new_out", "_plan")

    def __init__(self, plan: GeneralPlan, chances: int = CHANCES) -> None:
        super().__init__(chances)
        self._plan = plan

    def learn(self, replay: Replay, query: Tensor, out: Tensor, lse: Tensor | None, *, packed: bool) -> None:
        """Repeat calls like this one from now on; out is as the entry point returns it."""
        self._new_out = new_as(out, query, 0.0 if packed else None)
        self._new_lse = None if lse is None else new_as(lse, query, float("-inf") if packed else None)
        self._replay = replay  # last: other threads take it as soon as it is there

    def again(
        self, replay: Replay, query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and log-sum-exp of another call."""
        self._plan.calls += 1
        out = self._new_out(query)
        own = [tensor.data_ptr() for tensor in tensors]
        lse = None
        if self._new_lse is not None:
            lse = self._new_lse(query)
            own.append(lse.data_ptr())
        replay(query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), *own)
        return out, lse


class Backward(Recorded):
    """The launch of the backward of calls of a kind, for tensors that pass a guard: autograd chooses the layout of the
    output's gradient, and what a user's hooks have saved and restored may be laid out in any way.

    Args:
        tensors: those of a call, as `again` takes them. One that is there twice is so in all calls of the kind.
    """

    __slots__ = ("_distinct", "_guard", "_new", "_plan")

    def __init__(self, plan: GeneralPlan, tensors: Sequence[Tensor]) -> None:
        super().__init__(chances=1)
        self._plan = plan
        self._distinct = itemgetter(*{id(tensor): place for place, tensor in enumerate(tensors)}.values())
        self._guard = guard_of(*self._distinct(tensors))

    def learn(self, replay: Replay, inputs: Sequence[Tensor], gradients: Sequence[Tensor], *, packed: bool) -> None:
        """Repeat calls like this one from now on; the gradients are as the entry point returns them."""
        fill = 0.0 if packed else None
        self._new = tuple([new_as(one, like, fill) for one, like in zip(gradients, inputs, strict=True)])
        self._replay = replay

    def again(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Return the gradients of query, key and value, the first of the tensors, the last of which is the gradient of
        the output; None where these are others than those that were recorded."""
        replay = self.known
        if replay is None or not self._guard(*self._distinct(tensors)):
            return None
        addresses = [tensor.data_ptr() for tensor in tensors]
        if is_misaligned(addresses):
            return None
        self._plan.calls += 1
        new_query, new_key, new_value = self._new
        gradients = new_query(tensors[0]), new_key(tensors[1]), new_value(tensors[2])
        addresses += [one.data_ptr() for one in gradients]
        replay(*addresses)
        return gradients


def is_misaligned(addresses: Sequence[int]) -> bool:
    """Return whether compiled code may not take one of the addresses for a multiple of 16."""
    together = 0
    for address in addresses:
        together |= address
    return together % ALIGNMENT_BYTES != 0
