"""Triton's interpreter with less to do around every operation: tiles of tests are small, so that this takes most time.

Nothing here changes a result. Both the pinned Triton and the newest one find the same things out again and again:

- Before every call of a jitted function, also from another one, which builtins the language has, and it replaces them.
- For every tensor its shape as a tuple of constants and the type of that tuple; for every handle NumPy's type.
- For every sum and product of integers the same in 64 bits, to assert that it fits, which only `debug` would read.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any


def do_less() -> None:
    """Let the interpreter of this process find things out once."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": _builtins_of})
    interpreter._patch_lang = _unless_patched(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_per_scalar(interpreter._get_np_dtype)
    core._type_for_tuple_values = _once_per_sizes(core._type_for_tuple_values)
    core.tuple.__eq__ = _without_copies(core.tuple.__eq__)
    core.tensor.__init__ = _begin_tensor
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    semantic.TritonSemantic.broadcast_impl_value = _unless_alike(broadcast)


def _builtins_of(part: Any) -> list[tuple[str, Any]]:
    """Return the builtins of a part of the language as they are now, perhaps replaced."""
    return [(name, getattr(part, name)) for name in _names_of_builtins(part)]


@cache
def _names_of_builtins(part: Any) -> tuple[str, ...]:
    from triton.language.core import is_builtin

    return tuple(name for name, member in inspect.getmembers(part) if is_builtin(member))


def _unless_patched(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Return what replaces the builtins that a function sees, unless its caller has."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    def patched(function: Callable[..., Any]) -> Any:
        fresh = any(is_builtin(language.load) for language in _languages_of(function))
        return patch(function) if fresh else interpreter._LangPatchScope()

    return patched


@cache
def _languages_of(function: Callable[..., Any]) -> tuple[ModuleType, ...]:
    """Return the modules of Triton's language that the function's module has imported."""
    import triton.language as tl

    return tuple(value for value in function.__globals__.values() if value is tl or value is tl.core)


def _once_per_scalar(np_dtype: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = np_dtype(scalar)
        return known[scalar.name]

    return remembered


def _once_per_sizes(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives tuples their types, and the same one to all tuples of the same numbers."""
    of_sizes = cache(lambda sizes: type_of(sizes))

    def remembered(values: Sequence[Any], fields: Any = None) -> Any:
        if fields is None and all(type(value) is int for value in values):
            return of_sizes((*values,))
        return type_of(values, fields)

    return remembered


def _without_copies(equal: Callable[..., Any]) -> Callable[..., Any]:
    """Return how tuples are compared; the language makes a new one of the other first, with its type."""
    from triton.language import core

    def compare(one: Any, other: Any) -> Any:
        return core.constexpr(one.values == other.values) if type(other) is core.tuple else equal(one, other)

    return compare


def _begin_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """Do what the constructor of the language's tensors does."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.numel, tensor.shape = _extent((*type.shape.values,) if type.is_block() else ())


@cache
def _extent(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    from triton.language import core

    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return what broadcasts two operands; the language also does where they have one shape."""

    def broadcasted(semantic: Any, one: Any, other: Any) -> Any:
        alike = one.type.is_block() and other.type.is_block() and one.type.shape == other.type.shape
        return (one, other) if alike else broadcast(semantic, one, other)

    return broadcasted
