"""From example arguments to what the compiler sees, as Triton's JIT derives it at a launch.

The result names the code in Triton's cache, so that it must agree to the letter: then a launch finds what was compiled
ahead. The letter differs between versions of Triton (3.9 lists every constant among the attributes, 3.6 those that are
texts), so the result comes from the JIT itself, with stand-ins for tensors.

Of an integer argument the compiler knows that 16 divides it, or nothing. Rows of 40, 72, 88, 104 or 120 elements of 16
bits begin at multiples of 16 bytes, but their strides have no such hint: loads of 2 bytes would follow, and no
asynchronous copies. So kernels take such strides in units of 8 elements, by which they multiply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.values.shape import FP8, SHORT_DTYPES

HINTED = 16
"""What an integer argument is known to be a multiple of, if it is one."""
ROW_UNIT = 8
"""Elements of 16 bits that a thread loads at once."""

TRITON_DTYPES = SHORT_DTYPES | {FP8: "fp8e4nv"} | {name: name for name in ("int32", "int8", "uint8")}


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor whose address is a multiple of 16 bytes."""

    dtype: str


@dataclass(frozen=True, slots=True)
class DescriptorArgument:
    """A tensor descriptor made on the host. swizzled: one of Gluon's, which name the layout in shared memory."""

    dtype: str
    block_shape: tuple[int, ...]
    swizzled: bool = False


def specialize(function: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> CompileSpec:
    """Return the compilation that a launch of `function` with these arguments and options asks for.

    Args:
        function: a `triton.jit` function.
        arguments: a value for each of its parameters, by name.
        options: the launch's options, such as num_warps and num_stages.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))  # arguments are specialised in the same way on every GPU
    bind = create_function_from_signature(function.signature, function.params, backend)
    keywords = {"enable_fp_fusion": True} | dict(options)  # Triton 3.9 warns where it is open; not part of the result
    values = (_stand_in(arguments[parameter.name]) for parameter in function.params)
    bound, specialization, _ = bind(*values, **keywords)
    _, signature, constants, attributes = function._pack_args(backend, keywords, bound, specialization, None)
    return CompileSpec(function, signature, constants, attributes, options)


def in_units(strides: Sequence[int], row_unit: int = ROW_UNIT) -> tuple[tuple[int, ...], int]:
    """Return strides in their unit, and the unit: row_unit where it divides all strides and HINTED does not, else 1."""
    hinted = all(stride % HINTED == 0 for stride in strides)
    unit = 1 if hinted or any(stride % row_unit for stride in strides) else row_unit
    return tuple(stride // unit for stride in strides), unit


def named_in_units(strides: Mapping[str, int], row_unit: int = ROW_UNIT, name: str = "UNIT") -> dict[str, int]:
    """Return what `in_units` returns as arguments, the unit by this name."""
    values, unit = in_units(tuple(strides.values()), row_unit)
    return dict(zip(strides, values, strict=True)) | {name: unit}


def _stand_in(value: Any) -> Any:
    """Return what the JIT takes for a tensor or descriptor, without any memory."""
    from triton import language as tl
    from triton.runtime.jit import MockTensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, TensorArgument):
        return MockTensor(tl.dtype(TRITON_DTYPES[value.dtype]))
    if isinstance(value, DescriptorArgument):
        sizes, strides = [1] * len(value.block_shape), [16] * (len(value.block_shape) - 1) + [1]
        base = MockTensor(tl.dtype(TRITON_DTYPES[value.dtype]))
        if value.swizzled:
            return _swizzled(value, base, sizes, strides)
        return TensorDescriptor(base, sizes, strides, list(value.block_shape))
    return value


def _swizzled(value: DescriptorArgument, base: Any, sizes: list[int], strides: list[int]) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for(
        list(value.block_shape), gl.float8e4nv if value.dtype == FP8 else getattr(gl, value.dtype)
    )
    return TensorDescriptor(base, sizes, strides, list(value.block_shape), layout)
