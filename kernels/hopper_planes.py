"""Tensors of any outer strides as the matrices that the copy engine of Hopper reads and writes."""

import functools
from dataclasses import dataclass
from typing import Any

ALIGNMENT_BYTES = 16
"""Of the address and of the distance of rows, for the copy engine."""


@dataclass(frozen=True, slots=True)
class Plane:
    """[batch, heads, length, head_dim] as a matrix whose row is a position and the rest of its memory.

    Position s of head h of batch entry b is row b * row_b + h * row_h + s, from column b * col_b + h * col_h on. By
    head in memory the columns are head_dim; by position they are all heads of a position. stride: elements a row.
    """

    rows: int
    columns: int
    stride: int
    row_b: int
    row_h: int
    col_b: int
    col_h: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """row_b, row_h, col_b, col_h."""
        return self.row_b, self.row_h, self.col_b, self.col_h


def plane_of(tensor: Any) -> Plane | None:
    """The plane of a tensor [batch, heads, length, head_dim], or None where the copy engine cannot address it.

    The distance of rows must be a multiple of 16 bytes; batch and heads must lie whole rows apart, or within a row.
    """
    batch, heads, length, dim = tensor.shape
    stride_b, stride_h, stride, step = tensor.stride()
    if step != 1 or stride < dim or stride * tensor.element_size() % ALIGNMENT_BYTES:
        return None
    row_b, col_b = _split(stride_b, stride) if batch > 1 else (0, 0)
    row_h, col_h = _split(stride_h, stride) if heads > 1 else (0, 0)
    columns = (batch - 1) * col_b + (heads - 1) * col_h + dim
    if columns > stride:
        return None
    return Plane((batch - 1) * row_b + (heads - 1) * row_h + length, columns, stride, row_b, row_h, col_b, col_h)


def _split(distance: int, stride: int) -> tuple[int, int]:
    """A distance in memory as (rows, 0) or (0, columns)."""
    return (0, distance) if distance % stride else (distance // stride, 0)


def is_readable(tensor: Any) -> bool:
    """Whether the copy engine can read and write the tensor where it is."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0 and plane_of(tensor) is not None


def describe(tensor: Any, plane: Plane, block_rows: int) -> Any:
    """The descriptor of a 16-bit plane for blocks of block_rows x head_dim."""
    dim = tensor.shape[-1]
    block = [block_rows, dim]
    return descriptor(tensor, [plane.rows, plane.columns], [plane.stride, 1], block, tiled(block_rows, dim, tensor.dtype))


def descriptor(base: Any, sizes: list[int], strides: list[int], block: list[int], layout: Any) -> Any:
    """A descriptor without its constructor's checks, which cost a microsecond each: `layout_problem` was asked."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.layout = base, sizes, strides, block, layout
    made.padding = "zero"
    return made


@functools.cache
def tiled(rows: int, columns: int, dtype: Any) -> Any:
    """The swizzled layout in shared memory of a 16-bit block."""
    import torch
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)
