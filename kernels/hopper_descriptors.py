"""Descriptors of tensors with any outer strides, for the copy engine of Hopper, made without a check a launch."""

import functools
from typing import Any

ALIGNMENT_BYTES = 16
"""Of the address and of every stride but the last."""


def is_describable(tensor: Any) -> bool:
    """Whether the copy engine can address a tensor [batch, heads, length, head_dim]: contiguous rows, all strides and
    the address aligned, nothing repeated."""
    *outer, step = tensor.stride()
    item = tensor.element_size()
    needed = (stride for stride, size in zip(outer, tensor.shape, strict=False) if size > 1)
    return (
        step == 1
        and tensor.data_ptr() % ALIGNMENT_BYTES == 0
        and all(stride > 0 and stride * item % ALIGNMENT_BYTES == 0 for stride in needed)
    )


def describe(tensor: Any, block_rows: int) -> Any:
    """The descriptor of a describable 16-bit tensor for blocks [1, 1, block_rows, head_dim]."""
    dim = tensor.shape[-1]
    outer = zip(tensor.stride()[:-1], tensor.shape, strict=False)
    strides = [stride if size > 1 else dim for stride, size in outer]  # where nothing follows any stride may stand
    layout = swizzled(block_rows, dim, tensor.dtype)
    return descriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, block_rows, dim], layout)


def descriptor(base: Any, sizes: list[int], strides: list[int], block: list[int], layout: Any) -> Any:
    """A descriptor without its constructor's checks, which take a microsecond each."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.layout = base, sizes, strides, block, layout
    return made


@functools.cache
def swizzled(rows: int, columns: int, dtype: Any) -> Any:
    """The layout in shared memory of a 16-bit block [1, 1, rows, columns]."""
    import torch
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)
