"""Triton's interpreter with less to do before a call.

Before every call of a jitted function, also from another one, it looks through all members of Triton's language for
the builtins that it replaces: a third of the time of such a test. Which names they have does not change, so here it
looks for them once.
"""

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any


def remember_builtins() -> None:
    """Let the interpreter of this process look through each part of the language once."""
    from triton.runtime import interpreter

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": _builtins_of})


def _builtins_of(part: Any) -> list[tuple[str, Any]]:
    """Return the builtins of a part of the language as they are now, perhaps replaced."""
    return [(name, getattr(part, name)) for name in _names_of_builtins(part)]


@cache
def _names_of_builtins(part: Any) -> tuple[str, ...]:
    from triton.language.core import is_builtin

    return tuple(name for name, member in inspect.getmembers(part) if is_builtin(member))
