"""The types and constants of calls: as a user writes them, and as a stored key tells them."""

import re
from collections.abc import Mapping
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.call import jitted_function
from blocktune.runtime.autotuned.config import TYPES, LaunchProblem, Plain
from blocktune.tuner.offline.arguments import parsed_argument, parts_of

_DESCRIPTOR = re.compile(r"(?P<dtype>\w+)d(?P<block>(\d+x)*\d+)?")
"""The word of a tensor descriptor in a stored key."""


def positional_signature(kernel: Any, text: str) -> dict[str, str]:
    """Return the words of a text by the names of the arguments that are no constants, in their order.

    Raises:
        UsageError: there are more or fewer of them, or one is no type and no value.
    """
    function = jitted_function(kernel)
    names = [param.name for param in function.params if not param.is_constexpr]
    words = parts_of(text)
    if len(words) != len(names):
        raise UsageError(
            f"A signature has a type for each of {', '.join(names)}, but {text!r} has {len(words)}. Write for example "
            "`*bf16,*bf16,i32:16`, or let a function launch the kernel: `--call MODULE:FUNCTION`."
        )
    for word in words:
        parsed_argument(word)
    return dict(zip(names, words, strict=True))


def call_of_problem(kernel: Any, problem: LaunchProblem) -> tuple[dict[str, str], dict[str, Plain]]:
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
    types = {name: _typed(word) for name, word in kinds.items() if name not in constants}
    return {name: _with_value(kind, values.get(name)) for name, kind in types.items()}, constants


_CONSTANT_WORDS: dict[str, Plain] = {"=1": 1, "none": None}
"""Words of a key for arguments that Triton makes constants of."""

_NUMBERS = {"i": "i32", "/16": "i32:16", "float": "fp32", "bool": "u1", "long": "i64", "long/16": "i64:16"}


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


def _with_value(kind: str, value: Plain) -> str:
    """Return the type of a number with the value that a key has of it, which heuristics may read."""
    return f"{kind.partition(':')[0]}={value}" if type(value) is int else kind


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
