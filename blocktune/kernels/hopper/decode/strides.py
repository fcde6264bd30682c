"""Sizes and strides as the Hopper decoding kernels take them, on the host; strides of keys and values are in words."""

from typing import Any

from blocktune.kernels.base.flash_kernel import contiguous_strides
from blocktune.kernels.base.specialize import in_units, named_in_units
from blocktune.kernels.values.shape import AttentionShape

WORD_BYTES = 4
WORD_UNIT = 4
"""Words that a thread loads at once."""


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
    rows = shape.features.page_size or shape.seqlen_k
    words: dict[str, int] = {}
    for letter, dim in (("k", shape.head_dim), ("v", shape.head_dim_v)):
        row = dim * shape.kv_bytes // WORD_BYTES
        values = (shape.num_heads_kv * rows * row, rows * row, row)
        words |= {f"stride_{letter}{axis}": value for axis, value in zip("bhn", values, strict=True)}
    elements = contiguous_strides(shape, "q") | contiguous_strides(shape, "o")
    return named_in_units(elements) | named_in_units(words, WORD_UNIT, "UNIT_KV")


def trailing(fixed: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any) -> tuple[Any, ...]:
    """Return the arguments that depend on sizes and strides only: strides, `fixed` and the units of the strides."""
    words = tuple(word_stride(tensor, axis) for tensor in (k, v) for axis in range(3))
    (elements, unit), (words, unit_kv) = in_units((*q.stride()[:3], *out.stride()[:3])), in_units(words, WORD_UNIT)
    return *elements[:3], *words, *elements[3:], *fixed, unit, unit_kv


def word_stride(tensor: Any, axis: int) -> int:
    """Return a stride of keys or values in words of 32 bits."""
    return int(tensor.stride(axis) * tensor.element_size() // WORD_BYTES)
