"""An autotuned kernel compiled for a GPU that need not be here, and how many of its blocks fit a multiprocessor."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.runtime.autotuned.call import jitted_function
from blocktune.runtime.autotuned.config import LAUNCH_OPTIONS, Plain
from blocktune.tuner.compile.compiler import compile_here
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy
from blocktune.tuner.offline.arguments import (
    CONSTANT,
    UNKNOWN,
    Argument,
    Parsed,
    flattened,
    kind_of,
    parsed_argument,
    value_of,
)

_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class OfflineCode:
    """A kernel compiled with these parameters, and its occupancy there."""

    kernel: str
    parameters: Mapping[str, Plain]
    occupancy: Occupancy

    @property
    def resources(self) -> KernelResources:
        return self.occupancy.resources

    def __str__(self) -> str:
        label = " ".join(f"{name}={value}" for name, value in self.parameters.items())
        spills = f", {self.resources.spill_bytes} spilled bytes per thread" if self.resources.spill_bytes else ""
        return f"{self.kernel} {label}".rstrip() + f"{spills}\n{self.occupancy}"


def compiled_offline(
    kernel: Any, signature: Mapping[str, str], parameters: Mapping[str, Any], limits: ComputeLimits
) -> OfflineCode:
    """Return a kernel compiled for a compute capability.

    Args:
        kernel: a function of `triton.jit`, in decorators or bare. What its heuristics compute is computed.
        signature: its arguments by name, as tuner/offline/arguments.py has them: `*bf16`, `i32:16`, `i32=1`.
        parameters: its constants and launch options.
        limits: of the target.

    Raises:
        UsageError: a type or a constant is missing or names nothing.
        NoFeasibleConfigError: it does not compile.
    """
    spec = spec_offline(kernel, signature, parameters)
    name = name_of(spec.function)
    compiled = compile_here(spec, limits.cc)
    if compiled.resources is None:
        raise NoFeasibleConfigError(
            f"{name} must compile for compute capability {limits.name}, but does not ({compiled.outcome}): "
            f"{compiled.error}"
        )
    return OfflineCode(name, dict(parameters), occupancy(compiled.resources, limits))


def name_of(function: Any) -> str:
    """Return the name of a jitted function, `module:function`."""
    return f"{function.fn.__module__}:{function.fn.__qualname__}"


def spec_offline(kernel: Any, signature: Mapping[str, str], parameters: Mapping[str, Any]) -> CompileSpec:
    """Return what is compiled of a kernel; arguments as of `compiled_offline`.

    Raises:
        UsageError: a type or a constant is missing or names nothing, or a heuristic reads a value that is not given.
    """
    function = jitted_function(kernel)
    names = [param.name for param in function.params]
    options = {key: value for key, value in parameters.items() if key in LAUNCH_OPTIONS and key not in names}
    arguments = {key: parsed_argument(text) for key, text in signature.items()}
    constants = _defaults(function, names, arguments)
    constants |= {key: value for key, value in parameters.items() if key not in options}
    constants |= _heuristics(kernel, function, arguments, parameters)
    _require_all(name_of(function), names, signature, constants)
    placed = [Argument(CONSTANT, constants[key]) if key in constants else arguments[key] for key in names]
    flat = flattened(placed)
    return CompileSpec(
        function=function,
        signature={key: kind_of(argument) for key, argument in zip(names, placed, strict=True)},
        constexprs={path: argument.value for path, argument in flat if argument.kind == CONSTANT},
        attrs={path: _DIVISIBLE for path, argument in flat if argument.divides},
        options=options,
    )


def _defaults(function: Any, names: Sequence[str], arguments: Mapping[str, Parsed]) -> dict[str, Any]:
    """Return the defaults of arguments that the signature does not tell."""
    parameters = function.signature.parameters
    values = {key: parameters[key].default for key in names if key not in arguments}
    return {key: value for key, value in values.items() if value is not inspect.Parameter.empty}


def _heuristics(
    kernel: Any, function: Any, arguments: Mapping[str, Parsed], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the constants that the kernel's heuristics compute, unless they are given; as at a launch, those see no
    defaults.

    Raises:
        UsageError: one fails, such as by a value that is not given.
    """
    values = {key: value_of(argument) for key, argument in arguments.items()}
    known = {key: value for key, value in values.items() if value is not UNKNOWN} | dict(parameters)
    found: dict[str, Any] = {}
    inner = kernel
    while inner is not function:
        for key, compute in getattr(inner, "values", {}).items():
            if key not in parameters:
                known[key] = found[key] = _computed(name_of(function), key, compute, known)
        inner = inner.fn
    return found


def _computed(name: str, key: str, compute: Callable[[dict[str, Any]], Any], known: dict[str, Any]) -> Any:
    """Return what a heuristic computes.

    Raises:
        UsageError: it fails.
    """
    try:
        return compute(known)
    except Exception as error:  # whatever an author's function raises
        raise UsageError(
            f"A heuristic of {name} computes {key} from the call, but fails with {type(error).__name__}: {error}. Give "
            f"the values that it reads, as in `i32=1024`, or {key} itself by --param."
        ) from error


def _require_all(name: str, names: list[str], signature: Mapping[str, str], constants: Mapping[str, Any]) -> None:
    """Require that every argument has a type or a value.

    Raises:
        UsageError: an argument has neither a type nor a value, or something is given that is no argument.
    """
    missing = [key for key in names if key not in signature and key not in constants]
    unknown = [key for key in (*signature, *constants) if key not in names]
    if missing or unknown:
        problem = f"{', '.join(missing)} has neither" if missing else f"it has no {', '.join(unknown)}"
        raise UsageError(
            f"Each argument of {name} has a type in the signature or a constant among the parameters, but {problem}. "
            f"Its arguments are {', '.join(names)}."
        )
