"""Attention of the same queries over several sets of keys, merged at once, in float32.

A set gives a row of the output and its log-sum-exp. The merged output is the mean of all outputs, each
weighted with exp of its log-sum-exp.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import padded_width

WARPS = 4


@triton.jit(do_not_specialize=["sets", "rows"])
def merge_gathered_kernel(
    Parts, Out, Lse, sets, rows,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, SETS: tl.constexpr,
):  # fmt: skip
    """Program (row): a row of Out float32 [rows, HEAD_DIM_V] and of Lse float32 [rows], from Parts float32 [sets, rows,
    HEAD_DIM_V + 1], whose last column is the log-sum-exp. SETS: a power of two, sets at least. A row that saw no key in
    any set becomes zeros and -inf."""
    row = tl.program_id(0).to(tl.int64)
    number, columns = tl.arange(0, SETS), tl.arange(0, WIDTH_V)
    places = Parts + (number.to(tl.int64) * rows + row) * (HEAD_DIM_V + 1)  # [SETS]
    lse = tl.load(places + HEAD_DIM_V, mask=number < sets, other=float("-inf"))
    top = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    mask = (number < sets)[:, None] & (columns < HEAD_DIM_V)[None, :]
    # [SETS, WIDTH_V]
    parts = tl.load(places[:, None] + columns[None, :], mask=mask, other=0.0)
    out = tl.sum(weights[:, None] * parts, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(Out + row * HEAD_DIM_V + columns, out, mask=columns < HEAD_DIM_V)
    tl.store(Lse + row, top + tl.log(tl.where(total == 0.0, 1.0, total)))  # top is -inf where the total is 0


def merge_gathered(parts: Any) -> tuple[Any, Any]:
    """Return the output [batch, num_heads, rows, head_dim_v] and the log-sum-exp [batch, num_heads, rows] over all sets
    of keys.

    parts: [sets, batch, num_heads, rows, head_dim_v + 1], contiguous, float32, or float64 on a CPU; the log-sum-exp is
    the last column.
    """
    if parts.is_cuda:
        return launch_merge_gathered(parts)
    sums = parts[..., -1]
    total = torch.logsumexp(sums, 0)
    weights = (sums - total.masked_fill(total.isneginf(), 0.0)).exp()  # -inf minus -inf is no number
    return (parts[..., :-1] * weights.unsqueeze(-1)).sum(0), total


def launch_merge_gathered(parts: Any) -> tuple[Any, Any]:
    """Do what `merge_gathered` does by one kernel."""
    sets, head_dim_v = parts.shape[0], parts.shape[-1] - 1
    out = parts.new_empty(*parts.shape[1:-1], head_dim_v)
    lse = parts.new_empty(parts.shape[1:-1])
    if lse.numel():
        merge_gathered_kernel[(lse.numel(),)](
            parts, out, lse, sets, lse.numel(), HEAD_DIM_V=head_dim_v, WIDTH_V=padded_width(head_dim_v),
            SETS=triton.next_power_of_2(sets), num_warps=WARPS,
        )  # fmt: skip
    return out, lse
