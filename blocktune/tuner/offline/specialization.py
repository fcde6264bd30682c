"""Specializations of an autotuned kernel's launch, found without compiling, and their way to another process.

Triton itself says what it would compile: its `jit_cache_hook` gets signature, constants, attributes and options of a
launch, and keeps it from compiling by returning true. So a specialization is that of the real call, whatever
heuristics, defaults and descriptors are between the call and the code.
"""

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import AutotunedCall, jitted_function
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.compile.compiler import compile_key

_hook_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Specialization:
    """The specialization that one config of a call compiles.

    spec: as Triton has it. document: for another process; None where it cannot travel. key: under which Triton keeps
    the code.
    """

    config: LaunchConfig
    spec: CompileSpec
    document: Mapping[str, Any] | None
    key: str


def specialization_of(call: AutotunedCall, config: LaunchConfig, cc: tuple[int, int]) -> Specialization | None:
    """Return what a config of a call compiles; None if this process has the code already, or Triton cannot describe
    it."""
    told = _specialization_data(call, config)
    if told is None:
        return None
    options = json.loads(told["specialization_data"])["options"]
    spec = CompileSpec(
        function=call.function,
        signature=told["signature"],
        constexprs=told["constants"],
        attrs=told["configs"][0],
        options=_tuples(options),
    )
    return specialization_from(call.name, config, spec, cc)


def specialization_from(name: str, config: LaunchConfig, spec: CompileSpec, cc: tuple[int, int]) -> Specialization:
    """Return the specialization of a spec, whose kernel has this name."""
    key = compile_key(spec, cc)
    return Specialization(config, spec, _travelling_document(name, spec, key, cc), key)


def document_of(spec: CompileSpec) -> dict[str, Any] | None:
    """Return what `spec_of` makes the spec of again, as JSON has it; None where a constant is more than a value, a data
    type or a jitted function."""
    document = {
        "signature": dict(spec.signature),
        "constant_keys": list(spec.constexprs),
        "constant_vals": [_constant_document(value) for value in spec.constexprs.values()],
        "attrs_keys": list(spec.attrs),
        "attrs_vals": list(spec.attrs.values()),
        "options": dict(spec.options),
    }
    try:
        found: dict[str, Any] = json.loads(json.dumps(document))
    except TypeError:
        return None
    return found


def spec_of(function: Any, document: Mapping[str, Any]) -> CompileSpec:
    """Return the spec that a document stands for."""
    constants = zip(document["constant_keys"], document["constant_vals"], strict=True)
    attributes = zip(document["attrs_keys"], document["attrs_vals"], strict=True)
    return CompileSpec(
        function=function,
        signature={name: _tuples(kind) for name, kind in document["signature"].items()},
        constexprs={tuple(path): _constant(value) for path, value in constants},  # paths, as Triton's
        attrs={tuple(path): value for path, value in attributes},
        options=_tuples(document["options"]),
    )


def object_named(name: str) -> Any:
    """Return what a module has under the name `module:qualified.name`.

    Raises:
        UsageError: nothing has this name, or its module cannot be imported.
    """
    module, _, path = name.partition(":")
    try:
        if module.startswith("."):
            raise ImportError("a name that begins with a dot is relative to a package, and there is none")
        return reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{name} cannot be imported: {error}. Write `module:function`, and look at the spelling and at PYTHONPATH."
        ) from error
    except Exception as error:  # whatever a module raises, such as where there is no GPU
        words = " ".join(str(error).split())
        raise UsageError(
            f"{name} cannot be imported: its module raises {type(error).__name__}: {words:.300} (import it in "
            "Python to see where)."
        ) from error


def function_named(name: str) -> Any:
    """Return the jitted function with this name, `module:qualified.name`.

    Raises:
        UsageError: there is none.
    """
    return jitted_function(object_named(name))


def is_importable(call: AutotunedCall) -> bool:
    """Return whether another process finds the kernel by its name: it is in no notebook, script or function."""
    return has_name(call.function, call.name)


def has_name(function: Any, name: str) -> bool:
    """Return whether another process finds a jitted function by this name."""
    module, _, path = name.partition(":")
    if module == "__main__" or "<locals>" in path or module not in sys.modules:
        return False
    try:
        return function_named(name) is function
    except UsageError:
        return False


def _specialization_data(call: AutotunedCall, config: LaunchConfig) -> dict[str, Any] | None:
    """Return what Triton says that it would compile."""
    from triton import knobs

    found: list[dict[str, Any]] = []
    thread, chosen = threading.get_ident(), call.launched(config)
    launched = {**call.kwargs, **chosen.all_kwargs(), "warmup": True}
    if chosen.pre_hook is not None:  # it gives descriptors the blocks of this config, which are part of their type
        chosen.pre_hook({**call.named, **chosen.all_kwargs()})
    with _hook_lock:
        earlier: Any = knobs.runtime.jit_cache_hook

        def hook(**told: Any) -> bool | None:
            if threading.get_ident() != thread:
                return earlier(**told) if earlier is not None else None
            found.append(told["compile"])
            return True

        knobs.runtime.jit_cache_hook = hook
        try:
            call.tuner.fn.run(*call.args, **launched)
        except TypeError:  # a constant that is no JSON, such as a function
            return None
        finally:
            knobs.runtime.jit_cache_hook = earlier
    return found[0] if found else None


def _travelling_document(name: str, spec: CompileSpec, key: str, cc: tuple[int, int]) -> dict[str, Any] | None:
    """Return the document of a spec if another process makes the same code of it."""
    document = document_of(spec) if has_name(spec.function, name) else None
    if document is None:
        return None
    try:
        same = compile_key(spec_of(spec.function, document), cc) == key
    except UsageError:  # a constant is a function that only this process has
        same = False
    return document if same else None


def _constant_document(value: Any) -> Any:
    from triton import language as tl
    from triton.runtime.jit import JITFunction

    if isinstance(value, JITFunction):
        return {"jit_function": f"{value.module}:{value.fn.__qualname__}"}
    if type(value) is tl.dtype:  # not a pointer or another type made of it
        return {"dtype": str(value)}
    return {"constexpr": value.value} if isinstance(value, tl.constexpr) else value


def _constant(value: Any) -> Any:
    from triton import language as tl

    if not isinstance(value, dict):
        return _tuples(value)
    if "jit_function" in value:
        return function_named(value["jit_function"])
    return tl.dtype(value["dtype"]) if "dtype" in value else tl.constexpr(_tuples(value["constexpr"]))


def _tuples(value: Any) -> Any:
    """Return the value with tuples in place of lists, which JSON knows alone."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
