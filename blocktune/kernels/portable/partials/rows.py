"""Attention over some keys is added to attention over others, row by row, in float32.

With lse the log-sum-exp over the earlier keys and lse' that over the new ones, the sum over both has the log-sum-exp
log(exp(lse) + exp(lse')), and the output is the mean of both outputs, weighted with exp(lse) and exp(lse').
"""

from typing import Any

import torch
import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.specialize import in_units
from blocktune.kernels.portable.forward.tiles import in_elements

MOST_ROWS = 64
WARPS = 4


@triton.jit(do_not_specialize=["num_heads", "rows", "tiles"])
def add_partial_kernel(
    Sum, Lse, Part, PartLse, Out, stride_sb, stride_sh, stride_sm, stride_lb, stride_lh, stride_pb, stride_ph,
    stride_pm, stride_ob, stride_oh, stride_om, num_heads, rows, tiles,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (tile of a head): BLOCK_M rows of Out = Sum with Part, [batch, num_heads, rows, HEAD_DIM_V] of any types,
    and of Lse float32 [batch, num_heads, rows], written again with PartLse float32 contiguous. Out may be Sum. The last
    dimension of each is contiguous. A row that saw no key stays as it is."""
    stride_sb, stride_sh, stride_sm = in_elements(stride_sb, stride_sh, stride_sm, UNIT)
    stride_pb, stride_ph, stride_pm = in_elements(stride_pb, stride_ph, stride_pm, UNIT)
    stride_ob, stride_oh, stride_om = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    positions = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = positions < rows
    places = Lse + batch * stride_lb + head * stride_lh + positions
    before = tl.load(places, mask=inside, other=float("-inf"))
    after = tl.load(PartLse + batch_head * rows + positions, mask=inside, other=float("-inf"))
    top = tl.maximum(before, after)
    base = tl.where(top == float("-inf"), 0.0, top)
    own, new = tl.exp(before - base), tl.exp(after - base)
    total = own + new
    total = tl.where(total == 0.0, 1.0, total)  # neither saw a key
    columns = tl.arange(0, WIDTH_V)
    tokens = positions.to(tl.int64)[:, None]
    mask = inside[:, None] & (columns[None, :] < HEAD_DIM_V)
    sums = Sum + batch * stride_sb + head * stride_sh + tokens * stride_sm + columns[None, :]
    parts = Part + batch * stride_pb + head * stride_ph + tokens * stride_pm + columns[None, :]
    places_out = Out + batch * stride_ob + head * stride_oh + tokens * stride_om + columns[None, :]
    # [BLOCK_M, WIDTH_V]
    out = tl.load(sums, mask=mask, other=0.0).to(tl.float32) * (own / total)[:, None]
    out += tl.load(parts, mask=mask, other=0.0).to(tl.float32) * (new / total)[:, None]
    tl.store(places_out, out.to(Out.dtype.element_ty), mask=mask)
    tl.store(places, tl.where(top == float("-inf"), top, base + tl.log(total)), mask=inside)


def add_partial(before: Any, lse: Any, part: Any, part_lse: Any, after: Any) -> None:
    """Write attention over earlier keys and over further ones to `after` and lse. after may be before.

    before, part and after are [batch, num_heads, rows, head_dim_v] of any types, lse and part_lse [batch, num_heads,
    rows] float32, or float64 on a CPU.
    """
    if not before.numel():
        return
    if before.is_cuda:
        launch_add_partial(before, lse, part, part_lse, after)
        return
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total.isneginf(), 0.0)  # -inf minus -inf is no number
    own, new = ((one - finite).exp().unsqueeze(-1) for one in (lse, part_lse))
    after.copy_(before * own + part * new)
    lse.copy_(total)


def launch_add_partial(before: Any, lse: Any, part: Any, part_lse: Any, after: Any) -> None:
    """Do what `add_partial` does by one kernel."""
    batch, num_heads, rows, head_dim_v = before.shape
    block_m = min(MOST_ROWS, 1 << (rows - 1).bit_length())
    tiles = -(-rows // block_m)
    part = part if part.stride(-1) == 1 else part.contiguous()
    strides, unit = in_units((*before.stride()[:3], *part.stride()[:3], *after.stride()[:3]))
    strides = *strides[:3], *lse.stride()[:2], *strides[3:]
    add_partial_kernel[(tiles * batch * num_heads,)](
        before, lse, part, part_lse.contiguous(), after, *strides, num_heads, rows, tiles,
        HEAD_DIM_V=head_dim_v, WIDTH_V=padded_width(head_dim_v), BLOCK_M=block_m, UNIT=unit, num_warps=WARPS,
    )  # fmt: skip
