"""The key of a compile fact: everything that the fact depends on, and nothing else.

Triton's own cache key changes with the line on which a kernel begins, with Python's version and with the build of
Triton's libraries. None of these changes the code, and a key of the repository has to be the same on every machine.
"""

import ast
import hashlib
import importlib
import inspect
import re
import struct
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import triton

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.source_hash import hash_of_sources
from blocktune.kernels.hardware.limits import limits_for
from blocktune.tuner.compile.compiler import options_of, ptxas_version

OURS = ("blocktune", "tests", "tools")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def key_of(
    measure: Callable[..., Any], specs: Sequence[CompileSpec], cc: tuple[int, int], rest: tuple[Any, ...]
) -> str:
    """Return 16 hexadecimal digits for what `measure` finds in the code of these specs.

    Raises:
        ValueError: a value has no text of its own, so that a change of it would go unnoticed.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars

    texts = [measure_digest(measure), triton.__version__, ptxas_version(cc), str(limits_for(cc).sm_arch), repr(rest)]
    texts.append(str(sorted(get_cache_invalidating_env_vars().items())))
    return _digest([*texts, *map(_spec_text, specs)])


def named(function: Any, digest_of: Callable[[Any], str]) -> str:
    """Return a function, or the function in a jitted one, with its digest: `module:function@digest`."""
    inner = inspect.unwrap(getattr(function, "fn", function))
    return f"{inner.__module__}:{inner.__qualname__}@{digest_of(function)}"


@cache
def kernel_hash(function: Any) -> str:
    """Return 16 hexadecimal digits of the device code of a jitted function."""
    return hash_of_sources(function)


def _spec_text(spec: CompileSpec) -> str:
    constants = [(place, _value_text(value)) for place, value in sorted(spec.constexprs.items())]
    parts = (named(spec.function, kernel_hash), list(spec.signature.items()), constants, sorted(spec.attrs.items()))
    return repr((*parts, sorted(options_of(spec).items())))


def _value_text(value: Any) -> str:
    """Return a constant as text, in which a jitted function is its source, also one in a tuple."""
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_value_text, value))})"
    return kernel_hash(value) if hasattr(value, "cache_key") else f"{type(value).__name__} {value!r}"


@cache
def measure_digest(measure: Callable[..., Any]) -> str:
    """Return 16 hexadecimal digits of the code of a function, and of all code and constants of ours that it names,
    directly or not. Comments and docstrings do not count.
    """
    texts: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [measure]
    while waiting:
        holder = inspect.unwrap(waiting.pop())
        if holder in seen:
            continue
        seen.add(holder)
        tree = ast.parse(textwrap.dedent(inspect.getsource(holder)))
        if holder is inspect.unwrap(measure):  # what remembers has no part in what is measured
            tree.body[0].decorator_list.clear()  # type: ignore[attr-defined]
        for name, value in _named(holder, tree):
            if _is_ours(value):
                waiting.append(value)
            elif not isinstance(value, ModuleType) and not callable(value):
                functions = list(_functions_in(value))
                waiting += functions
                texts.add(f"{name} = {_constant_text(value, functions)}")
        texts.add(ast.unparse(_without_docstrings(tree)))
    return _digest(sorted(texts))


def _named(holder: Any, tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the names, and names in modules, that a function or class finds outside of itself."""
    names = dict(vars(sys.modules[holder.__module__]))
    if isinstance(holder, FunctionType):
        names |= inspect.getclosurevars(holder).nonlocals
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            yield node.id, names[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            if isinstance(owner, ModuleType) and hasattr(owner, node.attr):
                yield node.attr, getattr(owner, node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            yield from ((alias.name, getattr(module, alias.name)) for alias in node.names)


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the functions of ours that a constant holds, such as a table of what to call."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _functions_in(part)
    elif _is_ours(value):
        yield value


def _constant_text(value: Any, functions: Sequence[Any]) -> str:
    """Return all of a constant, with its functions by name. The text of a long pattern would leave some of it out."""
    if isinstance(value, re.Pattern):
        return f"{value.pattern} {value.flags}"
    if isinstance(value, (set, frozenset)):  # whose own text has the order of this process's hashes
        return f"{type(value).__name__}({', '.join(sorted(map(repr, value)))})"
    text = value.format if isinstance(value, struct.Struct) else repr(value)
    for function in functions:
        text = text.replace(repr(function), function.__qualname__)
    return text


def _is_ours(value: Any) -> bool:
    inner = inspect.unwrap(value) if callable(value) else value
    return isinstance(inner, (FunctionType, type)) and inner.__module__.partition(".")[0] in OURS


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and len(node.body) > 1 and ast.get_docstring(node):
            del node.body[0]
    return tree


def _digest(texts: Sequence[str]) -> str:
    if found := next(filter(_ADDRESS.search, texts), None):
        raise ValueError(f"A compile fact needs values with a text of their own, but got {found!r}.")
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
