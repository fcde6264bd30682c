"""The fast path: find what computes a call by its options, then by one guard check in C.

An entry point checks arguments, makes views and builds a `Call`, whose plans are looked up by a long key: 30 to 80 us
of Python. All of it follows from the options and from type, sizes, strides, data type and device of the tensors, which
PyTorch's guards compare in one call. So the first call of a kind takes the slow path and leaves what it found here; the
next ones find it in about 2 us, or in 5 where no guard lets them pass: many kinds take turns, memory is not aligned, or
a tensor is in two places. Whatever else decides about a call is looked at in every call (`is_watched`), or is a state
that guards and keys know of.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, float32, is_grad_enabled
from torch._C import _get_deterministic_algorithms as is_deterministic

from blocktune.kernels.base.precision import allows_tf32
from blocktune.runtime.dispatch.launches.guards import Guard, is_watched, make_guard, never
from blocktune.runtime.dispatch.launches.kinds import ALIGNMENT_BYTES, rounds_products
from blocktune.runtime.dispatch.launches.layout import Layout
from blocktune.runtime.dispatch.obstacles import is_capturing

MAX_ENTRIES = 4096
"""Entries that are kept; a decoder that passes a new length every time must not fill them."""
MAX_GUARDS = 8
"""Of the same options: kinds of tensors whose guards are called, one after the other."""
CONSTANTS = (bool, int, float, str, type(None))
"""Options that stay what they are. A tensor of one number may be written to."""


class BoundCall(Protocol):
    """Computes the calls of one kind. drops: whether pairs are dropped, others in every call."""

    drops: bool

    def __call__(self, *tensors: Any, **call_values: Any) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp of query, key, value and the further tensors of a call."""

    def with_layout(self, layout: Layout) -> "BoundCall":
        """Return the same calls with tensors of another layout."""


State = Callable[[], bool]
"""Tells a state that decides about calls."""


class KnownCall(NamedTuple):
    """A bound call, the guard of its tensors, and the states that it needs besides, with what they were."""

    guard: Guard
    states: tuple[State, ...]
    before: list[bool]
    bound: BoundCall


class FastPath:
    """Keep bound calls by the options and the kinds of the tensors."""

    __slots__ = ("_all", "_guarded")

    def __init__(self) -> None:
        self._all: dict[Any, KnownCall] = {}  # by options and kinds
        self._guarded: dict[Any, tuple[KnownCall, ...]] = {}  # by options: those that were taken last

    def __len__(self) -> int:
        return len(self._all)

    def clear(self) -> None:
        """Forget all of them."""
        self._all, self._guarded = {}, {}

    def find(self, options: tuple[Any, ...], tensors: Sequence[Any]) -> BoundCall | None:
        """Return the bound call for these options and tensors (None for a tensor that is not given).

        Returns:
            None where there is no entry yet, or where something else decides about the call (`is_watched`).
        """
        return None if is_watched() else self.known(options, tensors)

    def known(self, options: tuple[Any, ...], tensors: Sequence[Any]) -> BoundCall | None:
        """Return `find` of a call that what `is_watched` sees has left behind: the kernel of one of PyTorch's ops."""
        address, are_all = 0, True
        try:
            for tensor in tensors:
                if type(tensor) is Tensor and not tensor.is_nested:
                    address |= tensor.data_ptr()
                elif tensor is None:
                    are_all = False
                else:
                    return None  # nested tensors without strides would end the process in a guard
            if not are_all:
                options = options, tuple([tensor is not None for tensor in tensors])
                tensors = [tensor for tensor in tensors if tensor is not None]
            guarded = self._guarded[options]
        except (RuntimeError, KeyError, TypeError):
            return None  # a sparse tensor has no memory to point to, and an option may have no hash
        if not address % ALIGNMENT_BYTES:
            for guard, states, before, bound in guarded:
                if guard(*tensors) and (not states or [state() for state in states] == before):
                    return bound
        return self._by_kind(options, tensors)

    def _by_kind(self, options: tuple[Any, ...], given: Sequence[Any]) -> BoundCall | None:
        """Return what serves such a call, if it is known, and call its guard first from now on."""
        entry = self._all.get((options, _kinds(given)))
        if entry is None:
            return None
        self._put_first(options, entry)
        return entry.bound

    def _put_first(self, options: tuple[Any, ...], entry: KnownCall) -> None:
        guarded = self._guarded.get(options, ())
        if entry.guard is not never and entry not in guarded:
            guarded = (entry, *guarded)[:MAX_GUARDS]
        self._guarded[options] = guarded

    def add(self, options: tuple[Any, ...], tensors: Sequence[Tensor | None], bound: BoundCall) -> None:
        """Remember what has served a call with these options and tensors, unless something else decides about it."""
        if not is_watched():
            self.keep(options, tensors, bound)

    def keep(self, options: tuple[Any, ...], tensors: Sequence[Tensor | None], bound: BoundCall) -> None:
        """Remember what has served a call that `known` is to find."""
        given = [tensor for tensor in tensors if tensor is not None]
        if not all(map(_is_constant, options)) or not all(map(_has_memory, given)):
            return
        if len(given) < len(tensors):
            options = options, tuple([tensor is not None for tensor in tensors])
        if len(self._all) >= MAX_ENTRIES:
            self.clear()
        states = _states(given, bound)
        entry = KnownCall(_guard(given), states, [state() for state in states], bound)
        self._all[options, _kinds(given)] = entry
        self._put_first(options, entry)


def _kinds(given: Sequence[Any]) -> tuple[Any, ...]:
    """Return all that decides about a call with these tensors besides its options: what guards compare, the states that
    `_states` knows of, and what no guard lets pass: which tensors are the same, and which are not aligned."""
    places: dict[int, int] = {}
    kinds = [
        (
            places.setdefault(id(tensor), place),
            tensor.data_ptr() % ALIGNMENT_BYTES == 0,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_inference(),
        )
        for place, tensor in enumerate(given)
    ]
    recording = (is_grad_enabled(), is_deterministic()) if _need_gradients(given) else ()
    return rounds_products(given[0]), is_capturing(given[0]), recording, *kinds


def _guard(given: Sequence[Tensor]) -> Guard:
    """Return the guard of such tensors."""
    is_distinct = len(set(map(id, given))) == len(given)
    if not is_distinct or any(tensor.data_ptr() % ALIGNMENT_BYTES for tensor in given):
        return never
    return make_guard(*given)


def _states(given: Sequence[Tensor], bound: BoundCall) -> tuple[State, ...]:
    """Return what else has to stay as it is: whether float32 products are rounded, and where autograd may record the
    call, its mode and whether gradients are deterministic. A CUDA graph that is captured would drop the same pairs for
    ever."""
    watched: list[State] = []
    if given[0].dtype is float32:
        watched.append(allows_tf32)
    if _need_gradients(given):
        watched += is_grad_enabled, is_deterministic
    if bound.drops and given[0].is_cuda:
        watched.append(torch.cuda.is_current_stream_capturing)
    return tuple(watched)


def _need_gradients(given: Sequence[Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in given)


def _is_constant(option: Any) -> bool:
    return type(option) in CONSTANTS or (type(option) is tuple and all(map(_is_constant, option)))


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_nested and tensor.layout is torch.strided
