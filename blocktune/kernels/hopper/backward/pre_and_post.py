"""Before and after the Hopper backward: row statistics, an empty float32 dq, and dq in its own type and order.

`prepare_kernel` and `finish_kernel` are for lengths that 64 divides and heads as wide as the products, the other two
for any.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.masked_rows import is_masked_row, log2_keys
from blocktune.kernels.portable.forward.tiles import in_elements


@triton.jit
def comparand(lse):
    """Return what scores in base 2 are compared with: the log-sum-exp in base 2, and 1e30 for a row that sees no key,
    or none but infinite ones.

    Rounding makes it wrong by up to 2^-20 of itself where scores are accumulated on top of it (FOLD_LSE), else by a
    quarter of that. From 2^22 on it is raised by as much: no probability of such scores is above one, but they vanish.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    blind = lse == float("-inf")
    log2 = tl.where(blind, 0.0, lse) * LOG2_E
    size = tl.abs(log2)
    raised = log2 + tl.where(size < 4194304.0, 0.0, size * 0.00000095367431640625)
    return tl.where(blind, 1e30, raised)


@triton.jit
def masked_row(lse, kept_share):
    """Return what scores in base 2 are compared with in a row whose keys all count as -2^50
    (kernels/portable/forward/masked_rows.py): -2^52 (1 + log2(keys) / 64), which `limit_exponents` in
    kernels/hopper/biases/of_keys.py reads. The logarithm takes up the share of pairs that dropout keeps, unless that is
    None."""
    log2_sum = log2_keys(lse)
    if kept_share is not None:
        log2_sum += tl.log2(kept_share)
    return (log2_sum + 64.0) * -70368744177664.0


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def prepare_kernel(
    out, dout, lse, lse_log2, delta, dq_sums, counter, lse_factor,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
    num_heads, seqlen_q,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write delta [batch, num_heads, seqlen_q] = rowsum(out * dout), what scores are compared with (`comparand`),
    and zeros in dq_sums and in the counter.

    lse_factor: None, or where scores run ahead (ahead.py), -1 / scale_log2: then both statistics are left as the
    products begin with them, the one multiplied by it, the other one negative. Under a soft cap, which bends the
    products, it is 1. ROWS divides seqlen_q. stride_g*: of dout.
    """
    program = tl.program_id(0)
    first = program.to(tl.int64) * ROWS
    batch_head = first // seqlen_q
    batch = batch_head // num_heads
    head = batch_head % num_heads
    rows = (first % seqlen_q + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, HEAD_DIM)[None, :]
    # [ROWS, HEAD_DIM]
    o = tl.load(out + batch * stride_ob + head * stride_oh + rows * stride_om + columns)
    g = tl.load(dout + batch * stride_gb + head * stride_gh + rows * stride_gm + columns)
    # [ROWS]
    flat = first + tl.arange(0, ROWS)
    if lse_factor is not None:
        tl.store(delta + flat, -tl.sum(o.to(tl.float32) * g.to(tl.float32), 1))
        tl.store(lse_log2 + flat, comparand(tl.load(lse + flat)) * lse_factor)
    else:
        tl.store(delta + flat, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1))
        tl.store(lse_log2 + flat, comparand(tl.load(lse + flat)))
    # [ROWS, HEAD_DIM]
    tl.store(dq_sums + flat[:, None] * HEAD_DIM + columns, tl.zeros([ROWS, HEAD_DIM], tl.float32))
    if program == 0:
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def finish_kernel(
    dq_sums, dq, scale, stride_b, stride_h, stride_m, num_heads, seqlen_q,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write dq = scale * dq_sums. A program has a half of 64 queries: HALF columns of the head dimension, or,
    TRANSPOSED, HALF queries. The sums come in the order of the accumulator registers of wgmma (see `add_dq`)."""
    program = tl.program_id(0).to(tl.int64)
    # [64 * HALF]
    x = tl.load(dq_sums + program * (64 * HALF) + tl.arange(0, 64 * HALF))
    x = tl.reshape(x, [HALF // 8, 4, 8, 4, 2, 2])  # column / 8 | warp | lane / 4 | lane % 4 | + 8 rows | pair
    # [64, HALF]
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


@triton.jit
def begin_and_length(begins, batch, seqlen):
    """Return (batch entry of the tensors, first position, positions) of a sequence."""
    entry, begin, length = batch, 0, seqlen
    if begins is not None:
        entry = 0
        begin = tl.load(begins + batch)
        length = tl.load(begins + batch + 1) - begin
    return tl.cast(entry, tl.int64), begin, length


@triton.jit
def workspace_row(begins, begin, batch, head, num_heads, rows, BLOCK_M: tl.constexpr):
    """Return where a head of a sequence begins in the workspace (`first_row` in kernels/hopper/backward/tiles.py)."""
    if begins is not None:
        return head * rows + (begin + batch * BLOCK_M) // BLOCK_M * BLOCK_M
    else:
        return (batch * num_heads + head) * rows


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "rows", "programs"])
def prepare_rows_kernel(
    out, dout, lse, lse_log2, delta, dq_sums, counter, turns, cu_q, lse_factor,
    slopes, slope_batch, slope_head, kept_share,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, stride_lb, stride_lh,
    num_heads, seqlen_q, rows, programs,
    HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    ADDITIVE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Do what `prepare_kernel` does for any lengths: of every sequence, rows up to a multiple of BLOCK_M, and BLOCK_M
    at least.

    Rows that see no key (lse is -inf) and rows of the padding get 1e30 and 0 as lse and delta. WIDTH: columns of a row
    of dq_sums. turns: None, or an int32 for every BLOCK_M rows. programs: of a head, for the longest sequence. cu_q:
    None, or where packed sequences begin, int32. slopes, kept_share: of ALiBi and dropout, None without
    (kernels/hopper/biases/of_keys.py). ADDITIVE: rows may be masked ones (`masked_row`).
    """
    stride_ob, stride_oh, stride_om = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    stride_gb, stride_gh, stride_gm = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    whole: tl.constexpr = 256 if WIDTH > 128 else 128 if WIDTH > 64 else 64  # a power of two
    program = tl.program_id(0)
    if program == 0:
        tl.store(counter, 0)
    first = program % programs * ROWS
    batch = program // programs // num_heads
    head = (program // programs % num_heads).to(tl.int64)
    entry, begin, length = begin_and_length(cu_q, batch, seqlen_q)
    if first >= tl.maximum((length + BLOCK_M - 1) // BLOCK_M, 1) * BLOCK_M:
        return
    positions = first + tl.arange(0, ROWS)
    inside = positions < length
    columns = tl.arange(0, whole)[None, :]
    read = inside[:, None] & (columns < HEAD_DIM_V)
    tokens = (begin + positions).to(tl.int64)[:, None]
    # [ROWS, whole]
    o = tl.load(out + entry * stride_ob + head * stride_oh + tokens * stride_om + columns, mask=read, other=0.0)
    g = tl.load(dout + entry * stride_gb + head * stride_gh + tokens * stride_gm + columns, mask=read, other=0.0)
    # [ROWS]
    value = tl.load(
        lse + entry * stride_lb + head * stride_lh + begin + positions, mask=inside, other=float("-inf")
    )  # fmt: skip
    blind = value == float("-inf")
    flat = workspace_row(cu_q, begin, batch, head, num_heads, rows, BLOCK_M) + positions
    slope = tl.where(blind, 0.0, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1))
    compared = comparand(value)
    if slopes is not None:
        own = tl.load(slopes + batch.to(tl.int64) * slope_batch + head * slope_head)
        compared += own * 1.4426950408889634 * (positions % BLOCK_M)
    if kept_share is not None:
        compared += tl.log2(kept_share)
        slope *= kept_share
    if ADDITIVE:
        compared = tl.where(is_masked_row(value), masked_row(value, kept_share), compared)
    if lse_factor is not None:
        tl.store(delta + flat, -slope)
        tl.store(lse_log2 + flat, compared * lse_factor)
    else:
        tl.store(delta + flat, slope)
        tl.store(lse_log2 + flat, compared)
    # [ROWS, WIDTH]
    tl.store(dq_sums + flat[:, None] * WIDTH + columns, tl.zeros([ROWS, whole], tl.float32), mask=columns < WIDTH)
    if turns is not None:
        tl.store(turns + tl.min(flat, 0) // BLOCK_M, 0, mask=first % BLOCK_M == 0)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "rows", "programs"])
def finish_rows_kernel(
    dq_sums, dq, cu_q, scale, stride_b, stride_h, stride_m, num_heads, seqlen_q, rows, programs,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Do what `finish_kernel` does for any lengths: a program has a part of 64 queries, PART columns of WIDTH. The
    arguments are as in `prepare_rows_kernel`."""
    stride_b, stride_h, stride_m = in_elements(stride_b, stride_h, stride_m, UNIT)
    parts: tl.constexpr = 64 // PART if TRANSPOSED else WIDTH // PART
    program = tl.program_id(0)
    part = program % parts
    first = program // parts % programs * 64
    batch = program // parts // programs // num_heads
    head = (program // parts // programs % num_heads).to(tl.int64)
    entry, begin, length = begin_and_length(cu_q, batch, seqlen_q)
    if first >= length:
        return
    block = (workspace_row(cu_q, begin, batch, head, num_heads, rows, 64) + first) // 64
    # [64 * PART]
    x = tl.load(dq_sums + (block * parts + part) * (64 * PART) + tl.arange(0, 64 * PART))
    x = tl.reshape(x, [PART // 8, 4, 8, 4, 2, 2])  # as in `finish_kernel`
    # [64, PART]
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [64, PART]) * scale
    low = x.to(dq.dtype.element_ty)
    place = dq + entry * stride_b + head * stride_h + tl.cast(begin, tl.int64) * stride_m
    if TRANSPOSED:  # [head dimension, query]
        positions = (first + part * PART + tl.arange(0, PART))[:, None]
        columns = tl.arange(0, 64)[None, :]
        low = tl.trans(low)
    else:
        positions = (first + tl.arange(0, 64))[:, None]
        columns = (part * PART + tl.arange(0, PART))[None, :]
    tl.store(
        place + positions.to(tl.int64) * stride_m + columns, low, mask=(positions < length) & (columns < HEAD_DIM)
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads_kv", "seqlen_k", "blocks"])
def join_parts_kernel(
    dk_sums, dv_sums, dk, dv, cu_k, scale, stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm,
    num_heads_kv, seqlen_k, blocks,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write dk = scale * the sum of its PARTS, and dv without the scale, always in the same order.

    A program for half of the columns of 64 keys, or of 65 to 96 columns for as many as those beyond 64 are:
    (2 * blocks * num_heads_kv * batch, 2), first of dk, then of dv. blocks: of 64 keys of a head, whole tiles. cu_k:
    where packed sequences of keys begin, or None.
    """
    stride_kb, stride_kh, stride_km = in_elements(stride_kb, stride_kh, stride_km, UNIT)
    stride_vb, stride_vh, stride_vm = in_elements(stride_vb, stride_vh, stride_vm, UNIT)
    if tl.program_id(1) == 0:
        join_parts(
            dk_sums, dk, cu_k, scale, stride_kb, stride_kh, stride_km, num_heads_kv, seqlen_k, blocks, HEAD_DIM, WIDTH,
            PARTS,
        )  # fmt: skip
    else:
        join_parts(
            dv_sums, dv, cu_k, 1.0, stride_vb, stride_vh, stride_vm, num_heads_kv, seqlen_k, blocks, HEAD_DIM_V, WIDTH,
            PARTS,
        )  # fmt: skip


@triton.jit
def join_parts(
    sums, out, cu_k, scale, stride_b, stride_h, stride_m, num_heads_kv, seqlen_k, blocks,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write scale * the sum of one gradient's PARTS."""
    HALF: tl.constexpr = WIDTH - 64 if WIDTH > 64 and WIDTH < 128 else WIDTH // 2
    SIDES: tl.constexpr = WIDTH // HALF
    program = tl.program_id(0)
    side = program % SIDES
    block = program // SIDES % blocks
    batch_head = (program // SIDES // blocks).to(tl.int64)
    places = tl.arange(0, 64 * HALF)
    # [64 * HALF]
    x = tl.zeros([64 * HALF], tl.float32)
    for part in tl.static_range(PARTS):
        first = ((batch_head * PARTS + part) * blocks + block) * SIDES + side
        x += tl.load(sums + first * (64 * HALF) + places)
    x = tl.reshape(x, [HALF // 8, 4, 8, 4, 2, 2])  # as in `finish_kernel`
    # [64, HALF]
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [64, HALF]) * scale
    positions = (block * 64 + tl.arange(0, 64))[:, None]
    columns = (side * HALF + tl.arange(0, HALF))[None, :]
    batch = batch_head // num_heads_kv
    length = seqlen_k
    place = out + batch_head % num_heads_kv * stride_h
    if cu_k is None:
        place += batch * stride_b
    else:
        begin = tl.load(cu_k + batch)
        length = tl.load(cu_k + batch + 1) - begin
        place += begin.to(tl.int64) * stride_m
    tl.store(
        place + positions.to(tl.int64) * stride_m + columns, x.to(out.dtype.element_ty),
        mask=(positions < length) & (columns < HEAD_DIM),
    )  # fmt: skip
