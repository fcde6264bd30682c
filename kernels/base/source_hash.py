"""The identity of a kernel's device code, by which stored results know whether they still belong to it."""

import hashlib
import inspect
from typing import Any


def hash_of_sources(*functions: Any) -> str:
    """16 hexadecimal digits that change with the source of jitted functions or of any that they call.

    Triton's own `cache_key` would change with every line that is added above the function.
    """
    sources: dict[str, str] = {}
    for function in functions:
        sources |= device_sources(function)
    return hashlib.sha256("\n".join(sources[name] for name in sorted(sources)).encode()).hexdigest()[:16]


def device_sources(function: Any) -> dict[str, str]:
    """The source of a jitted function and of all jitted functions that it calls, by name."""
    sources = {function.fn.__qualname__: inspect.getsource(function.fn)}
    waiting = [function.fn]
    while waiting:
        python = waiting.pop()
        for name in python.__code__.co_names:
            callee = getattr(python.__globals__.get(name), "fn", None)
            if inspect.isfunction(callee) and callee.__qualname__ not in sources:
                sources[callee.__qualname__] = inspect.getsource(callee)
                waiting.append(callee)
    return sources
