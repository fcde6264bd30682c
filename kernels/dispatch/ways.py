"""The short way to what serves a call: its options name a few guards, and the guard that passes names the plans.

An entry point checks arguments, makes views and builds a `Call`, whose plans are looked up by a long key: 30 to 80 us
of Python. All of it follows from the options and from type, sizes, strides, data type and device of the tensors, which
PyTorch's guards compare in one call. So the first call of a kind goes the long way and leaves what it found here; the
next ones find it in about 2 us. Whatever else decides about a call is looked at in every call (`is_watched`), is part
of the key, or is part of the guard.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, float32, is_grad_enabled
from torch._C import _get_deterministic_algorithms as is_deterministic

from blocktune.kernels.base.precision import allows_tf32
from blocktune.kernels.dispatch.autograd import Served
from blocktune.kernels.dispatch.guards import Guard, guard_of, is_watched, never, while_unchanged
from blocktune.kernels.dispatch.torch_attention import ALIGNMENT_BYTES

MAX_OPTIONS = 4096
"""Options with guards of their own that are kept; a decoder that passes a new length every time must not fill them."""
MAX_GUARDS = 8
"""Of the same options: kinds of tensors that take turns."""
PLAIN = (bool, int, float, str, type(None))
"""Options that stay what they are. A tensor of one number may be written to."""

Way = tuple[Guard, Served]
Pattern = tuple[int, ...]
"""Which tensors of a call are given (empty for all); of one with a tensor in two places, the number of the tensor in
each place, -1 for none."""


class Ways:
    """What serves calls, by options and guards."""

    __slots__ = ("_by_options",)

    def __init__(self) -> None:
        self._by_options: dict[Any, tuple[Way, ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_options.values()))

    def of(self, options: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> Served | None:
        """Return what serves a call with these options and tensors; None where there is nothing yet, or where something
        else decides about the call."""
        if is_watched():
            return None
        given, address = [], 0
        try:
            for tensor in tensors:
                if tensor is not None:
                    if type(tensor) is not Tensor or tensor.is_nested:
                        return None
                    address |= tensor.data_ptr()
                    given.append(tensor)
        except RuntimeError:
            return None  # sparse tensors have no memory to point to
        if address % ALIGNMENT_BYTES:
            return None
        found = self._passed(options, _given(tensors) if len(given) < len(tensors) else (), given)
        if found is None and len(set(map(id, given))) < len(given):
            given, pattern = _distinct(tensors)
            return self._passed(options, pattern, given)
        return found

    def _passed(self, options: tuple[Any, ...], pattern: Pattern, given: list[Tensor]) -> Served | None:
        """Return what serves calls of the first kind whose guard lets these tensors pass."""
        try:
            ways = self._by_options.get((options, pattern, is_grad_enabled(), is_deterministic()))
        except TypeError:
            return None  # an option has no hash
        if ways is not None:
            for guard, served in ways:
                if guard(*given):
                    return served
        return None

    def add(self, options: tuple[Any, ...], tensors: Sequence[Tensor | None], served: Served) -> None:
        """Remember what has served a call with these options and tensors, unless something else decides about it."""
        given, pattern = _distinct(tensors)
        if not given or is_watched() or not all(map(_is_plain, options)):
            return
        guard, key = guard_of(*given), (options, pattern, is_grad_enabled(), is_deterministic())
        if guard is never:
            return
        guard = _with_state(guard, given[0], served)
        if len(self._by_options) >= MAX_OPTIONS:
            self._by_options.clear()
        self._by_options[key] = ((guard, served), *self._by_options.get(key, ()))[:MAX_GUARDS]


def _given(tensors: Sequence[Tensor | None]) -> Pattern:
    """Return which tensors are given. The first one is, so that this is no pattern of a tensor in two places."""
    return tuple([tensor is not None for tensor in tensors])


def _distinct(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], Pattern]:
    """Return the tensors that are given, each once, since guards take no tensor twice, and the pattern of the call.
    Nothing is given unless all are plain tensors with aligned memory: nested tensors without strides would end the
    process in a guard."""
    given = [tensor for tensor in tensors if tensor is not None]
    try:
        if any(type(one) is not Tensor or one.is_nested or one.data_ptr() % ALIGNMENT_BYTES for one in given):
            return [], ()
    except RuntimeError:
        return [], ()  # sparse tensors have no memory to point to
    once = list({id(tensor): tensor for tensor in given}.values())
    if len(once) == len(given):
        return given, _given(tensors) if len(given) < len(tensors) else ()
    places = {id(tensor): place for place, tensor in enumerate(once)}
    return once, tuple([-1 if tensor is None else places[id(tensor)] for tensor in tensors])


def _is_plain(option: Any) -> bool:
    return type(option) in PLAIN or (type(option) is tuple and all(map(_is_plain, option)))


def _with_state(guard: Guard, query: Tensor, served: Served) -> Guard:
    """Return the guard, as long as PyTorch wants float32 products as it does now, and pairs to drop are not captured in
    a graph, which would drop the same ones for ever."""
    if query.dtype is float32:
        guard = while_unchanged(guard, allows_tf32)
    if served.drops and query.is_cuda:
        guard = while_unchanged(guard, _captures)
    return guard


def _captures() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())
