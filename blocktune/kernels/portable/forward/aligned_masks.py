"""Mask tensors with rows that begin at multiples of 16 elements, one after the other: the pass that writes them.

Triton loads 16 bytes at a time where it knows that every row begins at such a multiple. Of a mask [829, 829] it loads
every element by itself, with an address of its own in registers: on an H200 attention of 16 columns takes 528 us for 78
with a mask of 832 keys. The pass reads the mask once, where the attention of every head reads it again. It runs in
every call, since nothing tells of all writes to a mask.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blocktune.kernels.base.feature_arguments import (
    aligned_width,
    broadcast_strides,
    mask_bytes,
    mask_element_bytes,
    own_mask_sizes,
)
from blocktune.kernels.base.kernel import CompileSpec
from blocktune.kernels.base.specialize import HINTED, TensorArgument, specialize
from blocktune.kernels.base.steps import ALIGNMENT_BYTES, Step
from blocktune.kernels.values.features import MaskKind
from blocktune.kernels.values.shape import AttentionShape

ROWS, KEYS = 8, 256
"""Of the tile that a program copies."""
OPTIONS = {"num_warps": 4}


@triton.jit(
    do_not_specialize=[
        "stride_mb",
        "stride_mh",
        "stride_mm",
        "stride_mn",
        "heads",
        "rows",
        "seqlen_k",
        "width",
        "count",
    ],
    do_not_specialize_on_alignment=["Mask"],
)
def align_mask_kernel(
    Mask, Aligned, stride_mb, stride_mh, stride_mm, stride_mn, heads, rows, seqlen_k, width, count,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows of KEYS elements of Mask, with strides (batch, head, query, key), to Aligned [count, width].

    count: heads * rows for every entry of the batch that has a mask of its own.
    """
    # [ROWS, 1]
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    entry, head, query = row // rows // heads, row // rows % heads, row % rows
    # [1, KEYS]
    key = (tl.program_id(1) * KEYS + tl.arange(0, KEYS))[None, :]
    source = Mask + entry * stride_mb + head * stride_mh + query * stride_mm + key.to(tl.int64) * stride_mn
    inside = (row < count) & (key < seqlen_k)
    tl.store(Aligned + row * width + key, tl.load(source, mask=inside), mask=inside)


class MaskRows(NamedTuple):
    """Masks of one kind of calls as the portable kernels read them: as they are, or as the pass copies them.

    copy: the pass; None without one. elements, dtype: of the copy. strides: of (batch, head, query, key) in what is
    read, 0 where all have the same.
    """

    copy: Step | None
    elements: int
    dtype: Any
    strides: tuple[int, ...]

    @classmethod
    def of(cls, mask: Any, *, pins: bool) -> "MaskRows":
        """Return how masks like this one are read, [batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k], any of them
        expanded, or None. One that all keys share is small, and is read as it is."""
        import torch

        strides = broadcast_strides(mask, 4)
        if mask is None or not strides[3] or _is_aligned(mask, strides):
            return cls(None, 0, torch.uint8, strides)
        mask = mask_bytes(mask)
        own, seqlen_k = own_mask_sizes(mask), mask.shape[3]
        batch, heads, rows = own
        count, width = batch * heads * rows, aligned_width(seqlen_k)
        grid = -(-count // ROWS), -(-seqlen_k // KEYS)
        rest = *strides, heads, rows, seqlen_k, width, count, ROWS, KEYS
        steps = zip(own, (heads * rows * width, rows * width, width), strict=True)
        of_copy = *(0 if size == 1 else step for size, step in steps), 1
        copy = Step(align_mask_kernel, grid, rest, OPTIONS, pins=pins)
        return cls(copy, count * width, mask.dtype, of_copy)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The pass, if there is one."""
        return () if self.copy is None else (self.copy,)

    def read(self, mask: Any, copied: Any) -> Any:
        """Enqueue the pass, if there is one, and return what the kernels read. mask, copied: as the steps take them;
        copied is memory for the elements, or None."""
        if self.copy is None:
            return mask
        self.copy(mask, copied)
        return copied


def mask_specs(shape: AttentionShape) -> tuple[CompileSpec, ...]:
    """Return the pass over a mask [seqlen_q, seqlen_k] for all of the batch, to be compiled offline; none where the
    mask is read as it is."""
    width = aligned_width(shape.seqlen_k)
    if mask_element_bytes(shape) == 0 or shape.seqlen_q == 1 or width == shape.seqlen_k:
        return ()
    own = TensorArgument("uint8" if shape.features.mask is MaskKind.BOOLEAN else shape.dtype)
    sizes = 0, 0, shape.seqlen_k, 1, 1, shape.seqlen_q, shape.seqlen_k, width, shape.seqlen_q, ROWS, KEYS
    values = dict(zip(align_mask_kernel.arg_names, (own, own, *sizes), strict=True))
    return (specialize(align_mask_kernel, values, OPTIONS),)


def _is_aligned(mask: Any, strides: tuple[int, ...]) -> bool:
    """Return whether every row begins at a multiple of `HINTED` elements, and its keys stand side by side."""
    *others, of_keys = strides
    is_dense = of_keys == 1 and not any(stride % HINTED for stride in others)
    return is_dense and mask.data_ptr() % ALIGNMENT_BYTES == 0
