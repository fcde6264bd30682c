"""An autotuned kernel compiled for a GPU that need not be here, and how many of its blocks fit a multiprocessor."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import NoFeasibleConfigError, UsageError
from blocktune.runtime.autotuned.call import jitted_function
from blocktune.runtime.autotuned.config import TYPES, Plain, Problem
from blocktune.runtime.autotuned.triton_config import LAUNCH_OPTIONS
from blocktune.tuner.jitted.compile_ahead import compile_here
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy

_DIVISIBLE = [["tt.divisibility", 16]]

_TYPE = re.compile(r"\*\w+(:16|:1)?|\w+(:16)?|tensordesc<\w+\[\d+( *, *\d+)*\]>")
"""The form of a type: a pointer, a number, or a tensor descriptor with its block."""

_BETWEEN_TYPES = re.compile(r",(?![^<]*>)")
"""A comma that does not stand between the numbers of a block."""

_DESCRIPTOR = re.compile(r"(?P<dtype>\w+)d(?P<block>(\d+x)*\d+)?")
"""The word of a tensor descriptor in a stored key."""


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


def positional_signature(kernel: Any, text: str) -> dict[str, str]:
    """Return the types of a text by the names of the arguments that are no constants, in their order.

    Raises:
        UsageError: there are more or fewer of them, or one is no type.
    """
    function = jitted_function(kernel)
    names = [param.name for param in function.params if not param.is_constexpr]
    types = [kind.strip() for kind in _BETWEEN_TYPES.split(text) if kind.strip()]
    if len(types) != len(names):
        raise UsageError(
            f"A signature has a type for each of {', '.join(names)}, but {text!r} has {len(types)}. Write for example "
            "`*bf16,*bf16,i32:16`."
        )
    wrong = [kind for kind in types if not _is_type(kind)]
    if wrong:
        raise UsageError(
            f"A signature has types as Triton spells them, but {wrong[0]!r} is none. Write `*bf16` for a pointer, "
            "`fp32` or `i32` for a number, `i32:16` for one that divides by 16, `tensordesc<bf16[64,64]>` for a tensor "
            "descriptor."
        )
    return dict(zip(names, types, strict=True))


def _is_type(kind: str) -> bool:
    """Return whether Triton knows a type of a signature."""
    from triton.language import str_to_ty

    if not _TYPE.fullmatch(kind):
        return False
    try:
        str_to_ty(kind.partition(":")[0], None)
    except KeyError:
        return False
    return True


def call_of_problem(kernel: Any, problem: Problem) -> tuple[dict[str, str], dict[str, Plain]]:
    """Return the types and constants of the calls that a stored key stands for, as far as the key tells them.

    Constants that are no key values are not among them, and neither is what heuristics compute.

    Raises:
        UsageError: the key does not tell the types: they are known by a hash, the kernel has other arguments now, or a
            config sets the block of a tensor descriptor.
    """
    function, values = jitted_function(kernel), dict(problem.arguments)
    words = str(values.pop(TYPES, "")).split()
    typed = [param for param in function.params if _has_a_word(param, values)]
    if len(words) != len(typed):
        names = ", ".join(param.name for param in typed)
        raise UsageError(
            f"The stored key tells the types of {names}, but holds {len(words)} of them: {' '.join(words)}. Give them "
            "by `--signature`, and constants by `--param`."
        )
    kinds = {param.name: word for param, word in zip(typed, words, strict=True)}
    kinds |= {param.name: _word_of(values[param.name]) for param in function.params if param.name in values}
    kinds |= {param.name: "i" for param in function.params if not (param.is_constexpr or param.name in kinds)}
    constants = {param.name: values[param.name] for param in function.params if _is_constant(param, values)}
    constants |= {name: _CONSTANT_WORDS[word] for name, word in kinds.items() if word in _CONSTANT_WORDS}
    return {name: _typed(word) for name, word in kinds.items() if name not in constants}, constants


_CONSTANT_WORDS: dict[str, Plain] = {"=1": 1, "none": None}
"""Words of a key for arguments that Triton makes constants of."""

_NUMBERS = {"i": "i32", "/16": "i32:16", "float": "fp32", "bool": "i1", "long": "i64", "long/16": "i64:16"}


def _has_a_word(param: Any, values: Mapping[str, Plain]) -> bool:
    """Return whether a key describes an argument by its type: one that is specialised by, and no key value."""
    return not (param.is_constexpr or param.do_not_specialize or param.name in values)


def _is_constant(param: Any, values: Mapping[str, Plain]) -> bool:
    return bool(param.is_constexpr) and param.name in values


def _word_of(value: Plain) -> str:
    """Return the word for a key value, as Triton would specialise by it."""
    if type(value) is not int:
        return "none" if value is None else type(value).__name__
    if value == 1:
        return "=1"
    long = "" if -(1 << 31) <= value < 1 << 31 else "long"
    return f"{long}/16" if value % 16 == 0 else long or "i"


def _typed(word: str) -> str:
    """Return the type, as `compiled_offline` takes it, that a word of a key stands for.

    Raises:
        UsageError: it is that of a tensor descriptor without its block.
    """
    from triton._utils import canonicalize_dtype

    if word in _NUMBERS:
        return _NUMBERS[word]
    descriptor = _DESCRIPTOR.fullmatch(word)
    if descriptor is None:
        pointer = f"*{canonicalize_dtype(word.rstrip('!'))}"
        return f"{pointer}:1" if word.endswith("!") else pointer
    if descriptor["block"] is None:
        raise UsageError(
            "The stored key tells the blocks of tensor descriptors unless hooks of the configs set them, as here. Give "
            "the types by `--signature`, such as `tensordesc<bf16[64,64]>`."
        )
    return f"tensordesc<{canonicalize_dtype(descriptor['dtype'])}[{descriptor['block'].replace('x', ',')}]>"


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
