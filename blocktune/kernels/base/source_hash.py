"""The identity of a kernel's device code, by which stored results know whether they still belong to it.

Triton's own `cache_key` finds the same dependencies, but it changes with every line that is added above the function
and with Triton's version. Here count the source of a function and of every jitted function that it names (directly,
through a module or a closure, in nested code, in an aggregate), and the values of the constants that device code names.
What Triton itself brings (`tl.sum`, `gl.zeros`) does not: its version stands next to the hash in every result.
"""

import ast
import contextlib
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Annotated, Any

from blocktune.kernels.files.known_hashes import known_hash

TritonTrait = Annotated[Any, "a constant that says what the present Triton is like"]
"""The annotation of a global constexpr that does not count: `COPIED: TritonTrait = gl.constexpr(hasattr(tma, "x"))`."""

_PLAIN = (bool, int, float, str, type(None))
_UNKNOWN = object()


def hash_of_sources(*functions: Any) -> str:
    """Return 16 hexadecimal digits that change with the device code of these functions.

    Args:
        functions: jitted functions, or objects that hold a host function which launches some as `fn`.
    """
    return known_hash(functions) or computed_hash(functions)


def computed_hash(functions: tuple[Any, ...]) -> str:
    """Return `hash_of_sources` by the sources themselves."""
    return hashlib.sha256(source_text(functions).encode()).hexdigest()[:16]


def source_text(functions: tuple[Any, ...]) -> str:
    """Return what counts of the sources of these functions, and of what they name, in the order of the names."""
    return "\n".join(text for _, text in sorted(_parts(functions)))


def _parts(functions: tuple[Any, ...]) -> set[tuple[str, str]]:
    """Return the sources and constants of all functions, each with its name."""
    parts: set[tuple[str, str]] = set()
    seen: set[Callable[..., Any]] = set()
    waiting = list(functions)
    while waiting:
        holder = waiting.pop()
        function = _function_of(holder)
        if function is None or function in seen:
            continue
        seen.add(function)
        source = _source_of(holder, function)
        parts.add((function.__qualname__, source))
        for name, value in _references(function, source):
            waiting += _holders(value)
            if (constant := _constant(value, on_device=_is_tritons(type(holder)))) is not None:
                parts.add((name, f"{name} = {constant}"))
    return parts


def _source_of(holder: Any, function: Callable[..., Any]) -> str:
    """Return the text of the function in a holder. Triton has read it when it decorated the function: to find where it
    ends again takes a millisecond."""
    lines = getattr(holder, "raw_src", None)
    return "".join(lines) if lines is not None and holder.fn is function else inspect.getsource(function)


def _references(function: Callable[..., Any], source: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function names outside of itself, nested code and default arguments included, decorators not."""
    names = _names(function)
    for node in _naming_nodes(source):
        if (value := _value_of(node, names)) is not _UNKNOWN:
            yield getattr(node, "id", getattr(node, "attr", "")), value


@cache
def _naming_nodes(source: str) -> tuple[ast.AST, ...]:
    """Return the names and attributes in the text of a function but for its decorators. Kernels share functions."""
    definition = ast.parse(textwrap.dedent(source)).body[0]
    decorators = getattr(definition, "decorator_list", ())
    parts = (part for part in ast.iter_child_nodes(definition) if part not in decorators)
    nodes = (node for part in parts for node in ast.walk(part))
    return tuple(node for node in nodes if isinstance(node, (ast.Name, ast.Attribute)))


def _names(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the globals and closure variables of a function that no local name hides, without Triton's traits."""
    code = function.__code__
    names = dict(function.__globals__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            names[name] = cell.cell_contents
    annotations = function.__globals__.get("__annotations__", {})
    hidden = {*code.co_varnames, *code.co_cellvars}
    hidden |= {name for name, kind in annotations.items() if kind in (TritonTrait, "TritonTrait")}
    return {name: value for name, value in names.items() if name not in hidden}


def _value_of(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return the value that `name` or `module.name` has, or `_UNKNOWN`."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return names.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, names)
        if isinstance(owner, (ModuleType, type)) and not _is_tritons(owner):
            return getattr(owner, node.attr, _UNKNOWN)
    return _UNKNOWN


def _holders(value: Any) -> list[Any]:
    """Return the jitted functions that a value stands for: itself, or the methods of an aggregate."""
    if getattr(value, "__triton_aggregate__", False):
        return [each for each in value.hash_attrs if _function_of(each) is not None]
    return [value] if _function_of(value) is not None else []


def _function_of(holder: Any) -> Callable[..., Any] | None:
    """Return the Python function in a jitted one, however often it is wrapped; None for others and what is Triton's."""
    inner = getattr(holder, "fn", None)
    while inner is not None and not inspect.isfunction(inner):
        inner = getattr(inner, "fn", None)
    return None if inner is None or _is_tritons(inner) else inner


def _constant(value: Any, *, on_device: bool) -> str | None:
    """Return a constant that device code may depend on as text, or None; of a host function only constexprs count."""
    from triton.language import constexpr, dtype  # not needed before the first kernel

    if isinstance(value, constexpr):
        text = str(value.value) if isinstance(value.value, dtype) else repr(value.value)
        return type(value.value).__name__ if " at 0x" in text else text
    if not on_device:
        return None
    if isinstance(value, dtype):
        return str(value)
    items = value if isinstance(value, tuple) else (value,)
    return repr(value) if all(isinstance(item, _PLAIN) for item in items) else None


def _is_tritons(thing: Any) -> bool:
    """Return whether a module, type or function is part of Triton."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return str(name).partition(".")[0] == "triton"
