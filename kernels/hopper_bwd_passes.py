"""Before and after the Hopper backward: row statistics, an empty float32 dq, and dq in its own type and order."""

import triton
import triton.language as tl

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def prepare_kernel(
    out, dout, lse, lse_log2, delta, dq_sums, counter,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
    num_heads, seqlen_q,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta [batch, num_heads, seqlen_q] = rowsum(out * dout), lse in base 2, zeros in dq_sums and in the counter.

    ROWS divides seqlen_q. stride_g*: of dout.
    """
    program = tl.program_id(0)
    first = program.to(tl.int64) * ROWS
    batch_head = first // seqlen_q
    batch = batch_head // num_heads
    head = batch_head % num_heads
    rows = (first % seqlen_q + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    o = tl.load(out + batch * stride_ob + head * stride_oh + rows * stride_om + columns)
    g = tl.load(dout + batch * stride_gb + head * stride_gh + rows * stride_gm + columns)
    flat = first + tl.arange(0, ROWS)
    tl.store(delta + flat, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1))
    tl.store(lse_log2 + flat, tl.load(lse + flat) * 1.4426950408889634)
    tl.store(dq_sums + flat[:, None] * HEAD_DIM + columns, tl.zeros([ROWS, HEAD_DIM], tl.float32))
    if program == 0:
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def finish_kernel(
    dq_sums, dq, scale, stride_b, stride_h, stride_m, num_heads, seqlen_q,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """dq = scale * dq_sums. One program for a half of 64 queries: HALF columns of the head dimension, or, TRANSPOSED,
    HALF queries; the sums come in the order of the accumulator registers of wgmma (see `add_dq`).
    """
    program = tl.program_id(0).to(tl.int64)
    x = tl.load(dq_sums + program * (64 * HALF) + tl.arange(0, 64 * HALF))
    x = tl.reshape(x, [HALF // 8, 4, 8, 4, 2, 2])  # column / 8 | warp | lane / 4 | lane % 4 | + 8 rows | pair
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [64, HALF]) * scale
    first = program // 2 * 64
    batch_head = first // seqlen_q
    place = dq + batch_head // num_heads * stride_b + batch_head % num_heads * stride_h
    first = first % seqlen_q
    side = program % 2 * HALF
    low = x.to(dq.dtype.element_ty)
    if TRANSPOSED:  # [head dimension, query]
        rows = first + side + tl.arange(0, HALF)
        tl.store(place + rows[:, None] * stride_m + tl.arange(0, 64)[None, :], tl.trans(low))
    else:
        rows = first + tl.arange(0, 64)
        tl.store(place + rows[:, None] * stride_m + side + tl.arange(0, HALF)[None, :], low)
