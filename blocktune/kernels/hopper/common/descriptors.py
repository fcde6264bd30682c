"""Descriptors of tensors with any outer strides, for the copy engine of Hopper, made without a check a launch."""

import functools
from typing import Any

ALIGNMENT_BYTES = 16
"""Of the address and of every stride but the last."""
PACKED_ROWS = 1 << 30
"""Tokens that packed sequences may have together; forward/copies.py and head_rows.py count with it, too."""
MANY_ROWS = 0x7FFF0000
"""A size that is never reached."""


def is_describable(tensor: Any) -> bool:
    """Return whether the copy engine can address a tensor [batch, heads, length, head_dim]: contiguous rows, all
    strides and the address aligned, nothing repeated."""
    *outer, step = tensor.stride()
    item = tensor.element_size()
    needed = (stride for stride, size in zip(outer, tensor.shape, strict=False) if size > 1)
    return (
        step == 1
        and tensor.data_ptr() % ALIGNMENT_BYTES == 0
        and all(stride > 0 and stride * item % ALIGNMENT_BYTES == 0 for stride in needed)
    )


def undescribable(kernel: str, **tensors: Any) -> str | None:
    """Return why a kernel's copy engine cannot address one of the tensors, which have their names; or None."""
    for name, tensor in tensors.items():
        if not is_describable(tensor):
            return (
                f"rows of {name} must be contiguous, and {ALIGNMENT_BYTES} must divide its address and its strides in "
                f"bytes, for {kernel}"
            )
    return None


def describe(tensor: Any, block_rows: int, block_columns: int | None = None) -> Any:
    """Return the descriptor of a describable 8-bit or 16-bit tensor for blocks [1, 1, block_rows, block_columns], by
    default of whole rows."""
    columns = tensor.shape[-1] if block_columns is None else block_columns
    block = [1, 1, block_rows, columns]
    return descriptor(tensor, list(tensor.shape), _strides(tensor), block, swizzled(block_rows, columns, tensor.dtype))


def describe_packed(tensor: Any, block_rows: int, block_columns: int) -> Any:
    """Return the descriptor of describable packed sequences [1, heads, tokens, head_dim] for blocks [1, 1, 1,
    block_rows, block_columns] that end where a sequence ends.

    The third of five dimensions from the end, of tokens, has 2^30 entries. Row i of a sequence that ends at token e and
    has n rows is its entry 2^30 - n + i, so that the copy engine clips at the sequence's end. The first two dimensions
    bring the address back: 2^30 steps of (2^34 - token stride), which wrap around to -2^30 token strides, and e token
    strides (the arithmetic of triton/tools/ragged_tma.py).
    """
    _, head_stride, token_stride, _ = _strides(tensor)
    _, heads, _, dim = tensor.shape
    sizes = [MANY_ROWS, MANY_ROWS, heads, PACKED_ROWS, dim]
    strides = [2**34 - token_stride, token_stride, head_stride, token_stride, 1]
    layout = swizzled(block_rows, block_columns, tensor.dtype, rank=5)
    return descriptor(tensor, sizes, strides, [1, 1, 1, block_rows, block_columns], layout)


def rows_between(cache: Any) -> int:
    """Return the rows from an entry or page [heads, rows, dim] of a cache to the next one, which `separable` caches
    have."""
    between: int = cache.stride(0) // cache.stride(2)
    return between


def inseparable(kernel: str, **caches: Any) -> str | None:
    """Return why a kernel's copy engine cannot address one of the caches, which have their names, as rows in a line; or
    None."""
    for name, cache in caches.items():
        if cache.stride(0) % cache.stride(2) or cache.shape[0] * rows_between(cache) >= MANY_ROWS:
            return (
                f"entries or pages of {name} must be whole rows apart, and fewer than {MANY_ROWS} of them together, "
                f"for {kernel}"
            )
    return None


def _strides(tensor: Any) -> list[int]:
    """Return the strides in elements; where nothing follows any stride may stand."""
    outer = zip(tensor.stride()[:-1], tensor.shape, strict=False)
    return [*(stride if size > 1 else tensor.shape[-1] for stride, size in outer), 1]


def descriptor(base: Any, sizes: list[int], strides: list[int], block: list[int], layout: Any) -> Any:
    """Return a descriptor without its constructor's checks, which take a microsecond each."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.layout = base, sizes, strides, block, layout
    return made


@functools.cache
def swizzled(rows: int, columns: int, dtype: Any, rank: int = 4) -> Any:
    """Return the layout in shared memory of a block [1, 1, rows, columns]."""
    import torch
    from triton.experimental.gluon import language as gl

    elements = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    return gl.NVMMASharedLayout.get_default_for([*[1] * (rank - 2), rows, columns], elements[dtype])
