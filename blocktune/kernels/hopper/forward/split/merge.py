"""The launch that merges what the parts of the keys leave: outputs and log-sum-exps, weighed by their sums."""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.tiles import in_elements

ROWS = 16
"""Queries of a program."""
WARPS = 4


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def merge_parts_kernel(
    Parts, LseParts, Out, Lse, stride_ob, stride_oh, stride_om, num_heads, seqlen_q,
    PARTS: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of Parts [batch * num_heads, PARTS, seqlen_q, HEAD_DIM_V] and LseParts [batch * num_heads, PARTS,
    seqlen_q] into Out, whose strides count UNIT elements, and Lse [batch * num_heads, seqlen_q], unless it is None.

    WIDTH: HEAD_DIM_V as a power of two.
    """
    batch_head = tl.program_id(1).to(tl.int64)
    # [ROWS]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < seqlen_q
    # [WIDTH]
    column = tl.arange(0, WIDTH)
    # [ROWS, WIDTH]
    inside = is_row[:, None] & (column < HEAD_DIM_V)[None, :]
    first = batch_head * PARTS * seqlen_q + row
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        lse = tl.load(LseParts + first + part * seqlen_q, mask=is_row, other=float("-inf"))
        top = tl.maximum(top, lse)
    top = tl.where(top == float("-inf"), 0.0, top)  # of a row that sees no key
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        place = first + part * seqlen_q
        weight = tl.exp(tl.load(LseParts + place, mask=is_row, other=float("-inf")) - top)
        total += weight
        acc += weight[:, None] * tl.load(Parts + place[:, None] * HEAD_DIM_V + column[None, :], mask=inside, other=0.0)
    is_seen = total != 0.0
    divisor = tl.where(is_seen, total, 1.0)
    acc = acc / divisor[:, None]
    batch, head = batch_head // num_heads, batch_head % num_heads
    strides = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    line = batch * strides.batch + head * strides.head + row.to(tl.int64) * strides.row
    tl.store(Out + line[:, None] + column[None, :], acc.to(Out.dtype.element_ty), mask=inside)
    if Lse is not None:
        lse = tl.where(is_seen, top + tl.log(divisor), float("-inf"))
        tl.store(Lse + batch_head * seqlen_q + row, lse, mask=is_row)
