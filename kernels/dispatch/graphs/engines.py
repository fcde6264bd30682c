"""The engines of this process, by the numbers that graphs name them with."""

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from blocktune.kernels.dispatch.engine import Engine

_engines: "WeakValueDictionary[int, Engine]" = WeakValueDictionary()
_numbers = count()


def registered(engine: "Engine") -> int:
    """Return the number by which graphs of this process name the engine. The first one is the default dispatcher's, in
    every process, so that graphs of it can be exported."""
    number = next(_numbers)
    _engines[number] = engine
    return number


def engine_of(number: int) -> "Engine":
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
