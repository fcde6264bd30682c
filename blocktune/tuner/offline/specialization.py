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
    document = {name: value for name, value in json.loads(told["specialization_data"]).items() if name != "key"}
    spec = CompileSpec(
        function=call.function,
        signature=told["signature"],
        constexprs=told["constants"],
        attrs=told["configs"][0],
        options=_tuples(document["options"]),
    )
    key = compile_key(spec, cc)
    return Specialization(config, spec, document if _travels(call, document, key, cc) else None, key)


def spec_of(function: Any, document: Mapping[str, Any]) -> CompileSpec:
    """Return the spec that Triton's description of a specialization stands for."""
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


def function_named(name: str) -> Any:
    """Return the jitted function with this name, `module:qualified.name`.

    Raises:
        UsageError: there is none.
    """
    return jitted_function(object_named(name))


def is_importable(call: AutotunedCall) -> bool:
    """Return whether another process finds the kernel by its name: it is in no notebook, script or function."""
    module, _, path = call.name.partition(":")
    if module == "__main__" or "<locals>" in path or module not in sys.modules:
        return False
    try:
        return function_named(call.name) is call.function
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


def _travels(call: AutotunedCall, document: Mapping[str, Any], key: str, cc: tuple[int, int]) -> bool:
    """Return whether another process makes the same code of the description."""
    return is_importable(call) and compile_key(spec_of(call.function, document), cc) == key


def _constant(value: Any) -> Any:
    from triton import language as tl

    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if isinstance(value, str) and tl.dtype.is_dtype(value) else value


def _tuples(value: Any) -> Any:
    """Return the value with tuples in place of lists, which JSON knows alone."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
