"""Arguments of a call in words, as a signature has them: types, types with a value, constants, tuples.

*bf16          a pointer whose address divides by 16; `*bf16:1` one that does not
i32, fp32      a number; `i32:16` one that divides by 16
i32=1          a number with this value, specialised as Triton does: 1 is a constant, 64 divides by 16
64, 1.5, true  the same, of the type that Triton takes Python's number for
none           a constant, as are tl.bfloat16, torch.bfloat16 and a jitted function, module:function
(*fp32, 1)     a tuple
tensordesc<bf16[64,64]>
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.values.errors import UsageError

_TYPE = re.compile(r"\*\w+(:16|:1)?|\w+(:16)?|tensordesc<\w+\[\d+( *, *\d+)*\]>")
"""The form of a type: a pointer, a number, or a tensor descriptor with its block."""

_BETWEEN = re.compile(r",(?![^<]*>)")
"""A comma that does not stand between the numbers of a block."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.<>]*")
_DTYPE = re.compile(r"(?:tl|torch)\.(\w+)")
_INTEGER = re.compile(r"([iu])(\d+)")
_LITERALS = {"none": None, "true": True, "false": False}

CONSTANT = "constexpr"
UNKNOWN = object()
"""The value of an argument that only has a type."""

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument. kind: its type as Triton spells it, or `CONSTANT`. value: `UNKNOWN` where it is not given."""

    kind: str
    value: Any = UNKNOWN
    divides: bool = False


Parsed = Argument | tuple["Parsed", ...]


def parsed_argument(text: str) -> Parsed:
    """Return the argument that a text stands for.

    Raises:
        UsageError: it is none.
    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        return tuple(parsed_argument(part) for part in parts_of(text[1:-1]))
    kind, equals, value = text.partition("=")
    if equals:
        return _valued(kind.strip(), _literal(value.strip(), text), text)
    if (constant := constant_of(text)) is not UNKNOWN:
        return _of_value(constant)
    return _typed(text)


def parts_of(text: str) -> list[str]:
    """Return the arguments of a text: what stands between commas, those of blocks and tuples left out."""
    parts, depth = [""], 0
    for piece in re.split(r"([(),<>])", text):
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(piece, 0)
        if piece == "," and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]


def constant_of(text: str) -> Any:
    """Return the value of a text: a literal, a data type, a jitted function or a tuple of them; else `UNKNOWN`.

    Raises:
        UsageError: it names no function or data type.
    """
    if text.startswith("(") and text.endswith(")"):
        values = tuple(constant_of(part) for part in parts_of(text[1:-1]))
        return UNKNOWN if UNKNOWN in values else values
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    if match := _DTYPE.fullmatch(text):
        return _dtype(match[1], text)
    if _FUNCTION.fullmatch(text):
        from blocktune.tuner.offline.specialization import function_named

        return function_named(text)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return UNKNOWN


def flattened(arguments: Sequence[Parsed], path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Argument]]:
    """Return the arguments with the path of each, those in tuples one by one."""
    found = []
    for place, argument in enumerate(arguments):
        here = (*path, place)
        found += flattened(argument, here) if isinstance(argument, tuple) else [(here, argument)]
    return found


def kind_of(argument: Parsed) -> Any:
    """Return the type of an argument, as a signature of Triton's has it."""
    return tuple(map(kind_of, argument)) if isinstance(argument, tuple) else argument.kind


def value_of(argument: Parsed) -> Any:
    """Return the value of an argument for functions of authors: a tensor without memory for a pointer, `UNKNOWN` for a
    number that only has a type."""
    if isinstance(argument, tuple):
        return tuple(map(value_of, argument))
    return _tensor(argument.kind[1:]) if argument.kind.startswith("*") else argument.value


def _typed(text: str) -> Argument:
    from triton.language import str_to_ty

    kind, _, alignment = text.partition(":")
    try:
        if not _TYPE.fullmatch(text):
            raise KeyError(text)
        str_to_ty(kind, None)
    except KeyError as error:
        raise UsageError(
            f"A signature has types as Triton spells them, and values, but {text!r} is none. Write `*bf16` for a "
            "pointer, `fp32` or `i32` for a number, `i32:16` for one that divides by 16, `i32=1` for one with this "
            "value, `none`, `(*bf16, 1)` for a tuple, `tensordesc<bf16[64,64]>` for a tensor descriptor."
        ) from error
    return Argument(kind, divides=alignment == "16" or (kind.startswith("*") and alignment != "1"))


def _literal(text: str, whole: str) -> bool | int | float:
    value = constant_of(text)
    if not isinstance(value, (bool, int, float)):
        raise UsageError(f"A number has a value after `=`, but {whole!r} has {text!r}. Write for example `i32=64`.")
    return value


def _valued(kind: str, value: bool | int | float, text: str) -> Argument:
    """Return a number of a type with a value."""
    _typed(kind)
    if kind.startswith(("fp", "bf")) and ":" not in kind:
        return Argument(kind, float(value))
    match = _INTEGER.fullmatch(kind)
    if match is None:
        raise UsageError(f"A number has a type and a value, but {text!r} is no number. Write for example `i32=64`.")
    low, high = _range_of(match[1] == "i", int(match[2]))
    if isinstance(value, float) or not low <= value <= high:
        raise UsageError(f"A number of {kind} is an integer from {low} to {high}, but {text!r} has another value.")
    if match[2] == "1":
        return Argument(kind, bool(value))
    found = _of_value(int(value))
    return found if found.kind == CONSTANT else Argument(kind, found.value, found.divides)


def _range_of(is_signed: bool, bits: int) -> tuple[int, int]:
    """Return the least and the largest integer of a type; that of one bit is a truth value."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed and bits > 1 else (0, (1 << bits) - 1)


def _of_value(value: Any) -> Argument:
    """Return the argument for a value, specialised as Triton does."""
    if isinstance(value, bool):
        return Argument("u1", value)
    if isinstance(value, float):
        return Argument("fp32", value)
    if not isinstance(value, int) or value == 1:
        return Argument(CONSTANT, value)
    kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"
    return Argument(kind, value, divides=value % ALIGNMENT == 0)


def _dtype(name: str, text: str) -> Any:
    from triton import language as tl
    from triton._utils import canonicalize_dtype

    found = getattr(tl, name, None)
    if isinstance(found, tl.dtype):
        return found
    try:
        return tl.dtype(canonicalize_dtype(name))
    except (KeyError, AssertionError) as error:
        raise UsageError(f"{text} is no data type of Triton's. Write for example `tl.bfloat16`.") from error


def _tensor(kind: str) -> Any:
    import torch
    from triton._utils import type_canonicalisation_dict

    names = (name for name, spelled in type_canonicalisation_dict.items() if spelled == kind)
    dtype = next((found for name in names if isinstance(found := getattr(torch, name, None), torch.dtype)), None)
    return torch.empty(0, dtype=dtype or torch.float32, device="meta")
