"""An autotuned kernel compiled for a GPU that need not be here, and how many of its blocks fit a multiprocessor."""

import inspect
from collections.abc import Mapping
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
    kernel: Any, signature: Mapping[str, str], parameters: Mapping[str, Plain], limits: ComputeLimits
) -> OfflineCode:
    """Return a kernel compiled for a compute capability.

    Args:
        kernel: a function of `triton.jit`, in decorators or bare.
        signature: the types of its arguments by name, as Triton spells them: `*bf16`, `i32`, `fp32`,
            `tensordesc<bf16[64,64]>`. A pointer divides by 16, unless `:1` follows; a number does where `:16` follows.
        parameters: its constants and launch options.
        limits: of the target.

    Raises:
        UsageError: a type or a constant is missing or names nothing.
        NoFeasibleConfigError: it does not compile.
    """
    function = jitted_function(kernel)
    name = f"{function.fn.__module__}:{function.fn.__qualname__}"
    compiled = compile_here(_spec(function, name, signature, parameters), limits.cc)
    if compiled.resources is None:
        raise NoFeasibleConfigError(
            f"{name} must compile for compute capability {limits.name}, but does not ({compiled.outcome}): "
            f"{compiled.error}"
        )
    return OfflineCode(name, dict(parameters), occupancy(compiled.resources, limits))


def _spec(function: Any, name: str, signature: Mapping[str, str], parameters: Mapping[str, Plain]) -> CompileSpec:
    options = {key: value for key, value in parameters.items() if key in LAUNCH_OPTIONS}
    constants = {key: value for key, value in parameters.items() if key not in LAUNCH_OPTIONS}
    defaults = {
        key: param.default
        for key, param in function.signature.parameters.items()
        if param.default is not inspect.Parameter.empty
    }
    names = [param.name for param in function.params]
    constants = {key: value for key, value in defaults.items() if key in names and key not in signature} | constants
    _require_all(name, names, signature, constants)
    kinds = {key: signature[key].partition(":")[0] if key in signature else "constexpr" for key in names}
    divisible = [place for place, key in enumerate(names) if _divides(signature.get(key, ""))]
    return CompileSpec(
        function=function,
        signature=kinds,
        constexprs={(names.index(key),): value for key, value in constants.items()},
        attrs={(place,): _DIVISIBLE for place in divisible},
        options=options,
    )


def _divides(kind: str) -> bool:
    return (kind.startswith("*") and not kind.endswith(":1")) or kind.endswith(":16")


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
