"""The engines of this process, by the numbers that graphs name them with."""

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.dispatch.autograd import KernelCall
from blocktune.runtime.dispatch.call import Call
from blocktune.runtime.dispatch.fast_path import BoundCall, FastPath

Remember = Callable[[FastPath, BoundCall], None]
"""Adds a bound call to the fast path."""


class GraphEngine(Protocol):
    """The part of an `Engine` that a graph's ops need."""

    def find_call(self, options: tuple[Any, ...], *tensors: Tensor | None) -> KernelCall | None: ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, lse: bool, remember: Remember | None
    ) -> tuple[Tensor, Tensor | None]: ...

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
        grad_lse: Tensor | None,
        remember: Remember | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

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
        grad_lse: Tensor | None,
    ) -> Tensor: ...


_engines: "WeakValueDictionary[int, GraphEngine]" = WeakValueDictionary()
_numbers = count()


def register_engine(engine: GraphEngine) -> int:
    """Return the number by which graphs of this process name the engine. The first one is the default dispatcher's, in
    every process, so that graphs of it can be exported."""
    number = next(_numbers)
    _engines[number] = engine
    return number


def engine_of(number: int) -> GraphEngine:
    """Return the engine with a number.

    Raises:
        UsageError: it is not in this process, or no more.
    """
    engine = _engines.get(number)
    if engine is None:
        raise UsageError(
            f"A compiled graph needs its dispatcher, but dispatcher {number} no longer exists or belongs to another "
            "process. Keep the dispatcher as long as the graph; to export a graph, use the default one, "
            "`blocktune.attention`."
        )
    return engine
