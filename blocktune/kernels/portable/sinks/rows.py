"""Attention sinks, after any forward kernel and next to any backward kernel.

A sink is a logit of a head that joins the denominator of every row's softmax and has no value (gpt-oss). With lse the
log-sum-exp of the row's own scores, that of the row is lse' = log(exp(lse) + exp(sink)), and the output is
out' = out * exp(lse - lse'). Probabilities are exp(score - lse'), so that a backward kernel that gets out' and lse'
computes the gradients of query, key and value; the sink's is -sum exp(sink - lse') * (rowsum(out' * dout) - dlse').
"""

from typing import Any

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import padded_width
from blocktune.kernels.base.specialize import in_units
from blocktune.kernels.portable.forward.tiles import in_elements

MOST_ROWS = 64
WARPS = 4


@triton.jit(do_not_specialize=["num_heads", "rows", "tiles"])
def add_sinks_kernel(
    Out, Lse, Sinks, stride_ob, stride_oh, stride_om, num_heads, rows, tiles,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (tile of a head): BLOCK_M rows of Out [batch, num_heads, rows, HEAD_DIM_V] and of Lse float32 [batch,
    num_heads, rows] contiguous are written again with Sinks [num_heads]. A row without keys keeps its zeros, and its
    log-sum-exp is the sink."""
    stride_ob, stride_oh, stride_om = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    head = batch_head % num_heads
    positions = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = positions < rows
    sink = tl.load(Sinks + head).to(tl.float32)
    places = Lse + batch_head * rows + positions
    lse = tl.load(places, mask=inside, other=float("-inf"))
    top = tl.maximum(lse, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    own = tl.exp(lse - base)
    total = own + tl.exp(sink - base)
    total = tl.where(total == 0.0, 1.0, total)  # neither a key nor a sink
    share = own / total
    columns = tl.arange(0, WIDTH_V)
    pointers = Out + batch_head // num_heads * stride_ob + head * stride_oh
    pointers = pointers + positions.to(tl.int64)[:, None] * stride_om + columns[None, :]
    mask = inside[:, None] & (columns[None, :] < HEAD_DIM_V)
    # [BLOCK_M, WIDTH_V]
    out = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * share[:, None]
    tl.store(pointers, out.to(Out.dtype.element_ty), mask=mask)
    tl.store(places, tl.where(top == float("-inf"), top, base + tl.log(total)), mask=inside)


@triton.jit(do_not_specialize=["num_heads", "rows", "tiles"])
def sink_gradients_kernel(
    Out, Dout, Lse, Dlse, Sinks, Parts, stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
    num_heads, rows, tiles, HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (tile of a head): what BLOCK_M rows add to the gradient of their head's sink, into Parts float32 [batch,
    num_heads, tiles]. Dout like Out; Dlse like Lse, or None; arguments otherwise as in `add_sinks_kernel`, after it."""
    stride_ob, stride_oh, stride_om = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    stride_gb, stride_gh, stride_gm = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    positions = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = positions < rows
    columns = tl.arange(0, WIDTH_V)
    tokens = positions.to(tl.int64)[:, None]
    mask = inside[:, None] & (columns[None, :] < HEAD_DIM_V)
    # [BLOCK_M, WIDTH_V]
    out = tl.load(
        Out + batch * stride_ob + head * stride_oh + tokens * stride_om + columns[None, :], mask=mask, other=0.0
    )  # fmt: skip
    dout = tl.load(
        Dout + batch * stride_gb + head * stride_gh + tokens * stride_gm + columns[None, :], mask=mask, other=0.0
    )  # fmt: skip
    # [BLOCK_M]
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    places = batch_head * rows + positions
    if Dlse is not None:
        delta -= tl.load(Dlse + places, mask=inside, other=0.0)
    lse = tl.load(Lse + places, mask=inside, other=float("inf"))
    sink = tl.load(Sinks + head).to(tl.float32)
    share = tl.exp(sink - tl.where(lse == float("-inf"), float("inf"), lse))
    tl.store(Parts + batch_head * tiles + tile, -tl.sum(share * delta, 0))


def add_sinks(out: Any, lse: Any, sinks: Any) -> None:
    """Write output [batch, num_heads, rows, head_dim_v] and log-sum-exp, float32 [batch, num_heads, rows] or packed
    [num_heads, rows], again with sinks [num_heads]."""
    grid, sizes, constants = _launch(out)
    strides, unit = in_units(out.stride()[:3])
    add_sinks_kernel[grid](out, lse, sinks.contiguous(), *strides, *sizes, **constants, UNIT=unit, num_warps=WARPS)


def sink_gradients(out: Any, lse: Any, grad: Any, grad_lse: Any, sinks: Any) -> Any:
    """Return the gradient of sinks [num_heads], in their type: of results with them, and of the gradients of these
    (that of the log-sum-exp may be None). The same bits in every run."""
    grid, sizes, constants = _launch(out)
    parts = lse.new_empty((out.shape[0], out.shape[1], sizes[-1]))
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    strides, unit = in_units((*out.stride()[:3], *grad.stride()[:3]))
    sink_gradients_kernel[grid](
        out, grad, lse, grad_lse, sinks.contiguous(), parts, *strides, *sizes, **constants, UNIT=unit, num_warps=WARPS,
    )  # fmt: skip
    return parts.sum((0, 2)).to(sinks.dtype)


def _launch(out: Any) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Return the grid, the run-time sizes and the constants of a pass over the rows of an output."""
    batch, num_heads, rows, head_dim_v = out.shape
    block_m = min(MOST_ROWS, 1 << (max(rows, 1) - 1).bit_length())
    tiles = -(-rows // block_m)
    constants = {"HEAD_DIM_V": head_dim_v, "WIDTH_V": padded_width(head_dim_v), "BLOCK_M": block_m}
    return (tiles * batch * num_heads,), (num_heads, rows, tiles), constants
