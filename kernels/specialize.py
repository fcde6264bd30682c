"""From example arguments to what the compiler sees, as Triton's JIT derives it at a launch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.kernel import CompileSpec
from blocktune.kernels.shape import SHORT_DTYPES

DIVISOR = 16
"""The JIT tells the compiler which integers and addresses are multiples of this."""
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor whose address is a multiple of 16 bytes."""

    dtype: str


@dataclass(frozen=True, slots=True)
class DescriptorArgument:
    """A tensor descriptor made on the host."""

    dtype: str
    block_shape: tuple[int, ...]


def specialize(function: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> CompileSpec:
    """The specialisation of a jitted function for these arguments, one for each of its parameters by name.

    A constexpr, None and an integer 1 become constants; other integers and addresses are marked where they are multiples
    of 16, unless the function says do_not_specialize.
    """
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[parameter.name] = "constexpr"
            constexprs[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, TensorArgument) or (type(value) is int and value % DIVISOR == 0 and not free):
            attrs[(index,)] = [["tt.divisibility", DIVISOR]]
    return CompileSpec(function, signature, constexprs, attrs, options)


def _type_of(value: Any) -> str:
    if isinstance(value, TensorArgument):
        return f"*{SHORT_DTYPES[value.dtype]}"
    if isinstance(value, DescriptorArgument):
        block = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{SHORT_DTYPES[value.dtype]}[{block}]>"
    if type(value) is int:
        return "i32" if abs(value) <= INT32_MAX else "i64"
    return "fp32"
