"""Sizes and strides as the Hopper decoding kernels take them, on the host; strides of keys and values are in words."""

from typing import Any

from blocktune.kernels.base.flash_kernel import contiguous_strides
from blocktune.kernels.values.shape import AttentionShape

WORD_BYTES = 4


def sizes(shape: AttentionShape) -> dict[str, int]:
    """Return the run-time integers of the kernel that the shape says, in order."""
    return {
        "num_heads": shape.num_heads,
        "group_size": shape.group_size,
        "total_rows": shape.batch * shape.num_heads * shape.seqlen_q,
        "seqlen_q": shape.seqlen_q,
        "seqlen_k": shape.seqlen_k,
    }


def example_strides(shape: AttentionShape) -> dict[str, int]:
    """Return the strides of contiguous tensors, and of pages, which take the place of batch entries; of keys and values
    in words."""
    strides = contiguous_strides(shape, "q")
    rows = shape.features.page_size or shape.seqlen_k
    for letter, dim in (("k", shape.head_dim), ("v", shape.head_dim_v)):
        words = dim * shape.kv_bytes // WORD_BYTES
        values = (shape.num_heads_kv * rows * words, rows * words, words)
        strides |= {f"stride_{letter}{axis}": value for axis, value in zip("bhn", values, strict=True)}
    return strides | contiguous_strides(shape, "o")


def trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    """Return the arguments that depend on sizes and strides only, `fixed` the last of them."""
    words = (word_stride(tensor, axis) for tensor in (k, v) for axis in range(3))
    return *q.stride()[:3], *words, *out.stride()[:3], *fixed


def word_stride(tensor: Any, axis: int) -> int:
    """Return a stride of keys or values in words of 32 bits."""
    return int(tensor.stride(axis) * tensor.element_size() // WORD_BYTES)
