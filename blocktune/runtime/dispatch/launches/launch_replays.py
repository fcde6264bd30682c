"""Calls of a kind whose launches are known: memory for the results, addresses, and the kernels again.

The first calls of a kind record what they launch (recording.py); the others make no views and look at no
size.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import itemgetter, or_
from typing import Any

from torch import Tensor

from blocktune.kernels.base.kernel import Launch
from blocktune.runtime.dispatch.launches.guards import Guard, make_guard
from blocktune.runtime.dispatch.launches.kinds import ALIGNMENT_BYTES
from blocktune.runtime.dispatch.launches.memory import new_like
from blocktune.runtime.dispatch.launches.plans import KernelPlan
from blocktune.runtime.dispatch.launches.recording import Recording
from blocktune.runtime.dispatch.launches.replay import LaunchReplay
from blocktune.runtime.dispatch.obstacles import is_capturing

CHANCES = 3
"""Launches that are recorded at most; on a stream that is new, for one, the first one fills what others find."""
MAX_LAYOUTS = 8
"""Layouts of gradients whose launches are recorded for a kind of call."""

address_of: Callable[[Tensor], int] = Tensor.data_ptr


class RecordedLaunch:
    """A launch of one kind, recorded until it can be repeated.

    Args:
        chances: launches that are recorded at most.
    """

    __slots__ = ("_chances", "_replay")

    def __init__(self, chances: int = CHANCES) -> None:
        self._chances = chances
        self._replay: LaunchReplay | None = None

    def launch(self, start: Callable[[], Any], inputs: Sequence[Tensor | None]) -> LaunchReplay | None:
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


class RepeatedLaunch(RecordedLaunch):
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
        replay = self._replay
        if replay is None or replay.is_hooked():
            self._replay = self.launch(partial(self._ordinary, *arguments), given) or self._replay
        else:
            replay.start(tuple(map(address_of, given)))


class ForwardReplay(RecordedLaunch):
    """The forward launch for a kind of calls, and what allocates its results."""

    __slots__ = ("_new_lse", "_new_out", "_plan")

    def __init__(self, plan: KernelPlan, chances: int = CHANCES) -> None:
        super().__init__(chances)
        self._plan = plan

    def learn(self, replay: LaunchReplay, out: Tensor, lse: Tensor | None, *, packed: bool) -> None:
        """Repeat calls like this one from now on; out is as the entry point returns it."""
        self._new_out = new_like(out, 0.0 if packed else None)
        self._new_lse = None if lse is None else new_like(lse, float("-inf") if packed else None)
        self._replay = replay  # last: other threads take it as soon as it is there

    def replay(
        self, given: tuple[Tensor, ...], tensors: Sequence[Tensor], words: Sequence[int]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the output and log-sum-exp of another call; None where its launch is not known, or a profiler watches
        kernels.

        Args:
            given: query, key and value.
            tensors: those of the call's extras.
            words: those of `drawn_words` where pairs are dropped.
        """
        replay = self._replay
        if replay is None or replay.is_hooked():
            return None
        self._plan.calls += 1
        out, new_lse = self._new_out(), self._new_lse
        if new_lse is None:
            replay.start(tuple(map(address_of, (*given, out, *tensors))), words)
            return out, None
        lse = new_lse()
        replay.start(tuple(map(address_of, (*given, out, *tensors, lse))), words)
        return out, lse


class BackwardReplay(RecordedLaunch):
    """The backward launch for a kind of calls, for tensors that pass a guard: autograd chooses the layout of the
    output's gradient, and what a user's hooks have saved and restored may be laid out in any way.

    Args:
        tensors: those of a call, as `again` takes them. One that is there twice is so in all calls of the kind.
    """

    __slots__ = ("_guard", "_new", "_plan")

    def __init__(self, plan: KernelPlan, tensors: Sequence[Tensor]) -> None:
        super().__init__(chances=1)
        self._plan = plan
        self._guard = _guard_of_distinct(tensors)

    def learn(self, replay: LaunchReplay, gradients: Sequence[Tensor], *, packed: bool) -> None:
        """Repeat calls like this one from now on; the gradients are as the entry point returns them."""
        self._new = tuple([new_like(one, 0.0 if packed else None) for one in gradients])
        self._replay = replay

    def replay(self, tensors: tuple[Tensor, ...], words: Sequence[int]) -> tuple[Tensor, ...] | None:
        """Return the gradients of query, key and value, the first of the tensors, the last of which is the gradient of
        the output; None where these are others than those that were recorded.

        Args:
            words: those of `drawn_words` where pairs were dropped.
        """
        replay = self._replay
        if replay is None or not self._guard(*tensors) or replay.is_hooked():
            return None
        addresses = tuple(map(address_of, tensors))
        if reduce(or_, addresses) % ALIGNMENT_BYTES:
            return None  # compiled code takes all of them for multiples of 16
        self._plan.calls += 1
        new_query, new_key, new_value = self._new
        gradients = dq, dk, dv = new_query(), new_key(), new_value()
        replay.start((*addresses, address_of(dq), address_of(dk), address_of(dv)), words)
        return gradients


def _guard_of_distinct(tensors: Sequence[Tensor]) -> Guard:
    """Return a guard of tensors, some of which may be one, that looks at each once: guards pass no tensor twice."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if len(places) == len(tensors):
        return make_guard(*tensors)
    distinct = itemgetter(*places.values())
    guard = make_guard(*distinct(tensors))
    return lambda *given: guard(*distinct(given))
