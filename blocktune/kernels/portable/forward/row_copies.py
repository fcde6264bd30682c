"""Copies of query, key and value whose rows end with zeros, by one launch."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.steps import Step

ROWS = 32
"""Rows of a program."""
WARPS = 4


class RowWidths(NamedTuple):
    """Columns of rows and of their copies. LENGTH_FIRST: copies are [batch, length, heads, columns] in memory."""

    HEAD_DIM: int
    HEAD_DIM_V: int
    WIDTH: int
    WIDTH_V: int
    COLUMNS: int
    """Of a block: a power of two."""
    ROWS: int
    LENGTH_FIRST: bool


@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qh", "stride_qm", "stride_kb", "stride_kh", "stride_km", "stride_vb", "stride_vh",
        "stride_vm", "batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_k",
    ],
    do_not_specialize_on_alignment=["q", "k", "v"],
)  # fmt: skip
def pad_rows_kernel(
    q, k, v, wide_q, wide_k, wide_v, stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_km, stride_vb,
    stride_vh, stride_vm, batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Program (block, tensor): ROWS rows of query, key or value, where it has so many."""
    if tl.program_id(1) == 0:
        pad_rows(
            q, wide_q, stride_qb, stride_qh, stride_qm, batch, num_heads, seqlen_q, WIDTHS.HEAD_DIM, WIDTHS.WIDTH,
            WIDTHS,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        pad_rows(
            k, wide_k, stride_kb, stride_kh, stride_km, batch, num_heads_kv, seqlen_k, WIDTHS.HEAD_DIM, WIDTHS.WIDTH,
            WIDTHS,
        )  # fmt: skip
    else:
        pad_rows(
            v, wide_v, stride_vb, stride_vh, stride_vm, batch, num_heads_kv, seqlen_k, WIDTHS.HEAD_DIM_V,
            WIDTHS.WIDTH_V, WIDTHS,
        )  # fmt: skip


@triton.jit
def pad_rows(
    x, out, stride_b, stride_h, stride_m, batch, num_heads, length, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of a tensor and zeros; nothing where its rows are wide enough."""
    if DIM < WIDTH:
        COLUMNS: tl.constexpr = WIDTHS.COLUMNS
        # [ROWS]
        row = tl.program_id(0).to(tl.int64) * WIDTHS.ROWS + tl.arange(0, WIDTHS.ROWS)
        inside = row < batch.to(tl.int64) * num_heads * length
        if WIDTHS.LENGTH_FIRST:
            head, position = row % num_heads, row // num_heads % length
        else:
            head, position = row // length % num_heads, row % length
        entry = row // length // num_heads
        columns = tl.arange(0, COLUMNS)[None, :]
        places = x + (entry * stride_b + head * stride_h + position * stride_m)[:, None] + columns
        # [ROWS, COLUMNS]
        values = tl.load(places, mask=inside[:, None] & (columns < DIM), other=0.0)
        tl.store(out + row[:, None] * WIDTH + columns, values, mask=inside[:, None] & (columns < WIDTH))


def pad_rows_launch(query: Any, key: Any, value: Any, widths: tuple[int, int], *, length_first: bool) -> Step:
    """Return launch(query, key, value, wide_query, wide_key, wide_value) for contiguous copies of tensors like these,
    [batch, heads, length, columns]. A tensor that is wide enough is passed instead of its copy, too.

    Args:
        query, key, value: with contiguous rows.
        widths: columns of the copies, of query and key, and of values.
        length_first: copies are [batch, length, heads, columns] in memory.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    _, num_heads_kv, seqlen_k, head_dim_v = value.shape
    most_rows = batch * max(num_heads * seqlen_q, num_heads_kv * seqlen_k)
    constants = RowWidths(head_dim, head_dim_v, *widths, padded_width(max(widths)), ROWS, length_first)
    strides = *query.stride()[:3], *key.stride()[:3], *value.stride()[:3]
    rest = *strides, batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, constants
    return Step(pad_rows_kernel, (-(-most_rows // ROWS), 3), rest, {"num_warps": WARPS}, pins=True)
