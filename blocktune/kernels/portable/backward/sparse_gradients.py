"""Gradients of block-sparse attention: device functions.

With p = exp2(score - lse) recomputed from the saved log-sum-exp, and delta = rowsum(dout * out):

    dv = p^T dout        ds = p * (dout v^T - delta)        dq = scale * ds k        dk = scale * ds^T q

(FlashAttention, arXiv 2205.14135, algorithm 4, cut into one pass for dq and one for dk and dv as FlashAttention-2 does,
so that nothing is added up between programs and every run gives the same bits).
"""

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import RUN_TIME_SIZES
from blocktune.kernels.portable.forward.sparse_tiles import LIST_SIZES, listed_tile, steps_before
from blocktune.kernels.portable.forward.tiles import in_elements, key_tiles, load_matrix, locate_tile


@triton.jit
def load_row_values(base, rows, seqlen_q, other, CHECK_ROWS: tl.constexpr):
    """One float32 of every row [BLOCK_M], `other` past the end."""
    if CHECK_ROWS:
        return tl.load(base + rows, mask=rows < seqlen_q, other=other)
    else:
        return tl.load(base + rows)


@triton.jit
def at_most_one(exponents, highest=0.0):
    """2 to these exponents, which rounding alone makes greater than the `highest`: probabilities. NaN stays NaN."""
    return tl.exp2(tl.minimum(exponents, highest, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def in_base_2(lse):
    """The log-sum-exp in base 2; inf for a row without keys, which leaves it no probability."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def store_matrix(tile, base, row, stride, num_rows, DIM: tl.constexpr):
    """Write [BLOCK, WIDTH] to rows row.. of a [num_rows, DIM] matrix."""
    rows = row + tl.arange(0, tile.shape[0])
    columns = tl.arange(0, tile.shape[1])
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows[:, None] < num_rows) & (columns[None, :] < DIM))


@triton.jit
def visible_pairs(rows, columns, seqlen_k, causal_offset, CAUSAL: tl.constexpr):
    """Whether each query sees each key, for rows and columns that broadcast against each other."""
    visible = columns < seqlen_k
    if CAUSAL:
        visible = visible & (columns <= rows + causal_offset)
    return visible


@triton.jit
def walk_for_dq(
    dq, q, dout, lse_2, delta, K, V, indices, shift, first, stop, row_start, stride_kn, stride_vn, seqlen_k,
    causal_offset, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, RAGGED_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M, WIDTH] / scale with the key tiles of steps first..stop-1 added. lse_2 is the base-2 log-sum-exp."""
    tile = listed_tile(indices, first, shift)
    for step in tl.range(first, stop, num_stages=STAGES):
        following = listed_tile(indices, tl.minimum(step + 1, stop), shift)
        k = load_matrix(K, tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED and RAGGED_K)
        v = load_matrix(V, tile * BLOCK_N, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, MASKED and RAGGED_K)
        # [BLOCK_M, BLOCK_N]
        p = at_most_one(tl.dot(q, k.T, input_precision=PRECISION) * scale_log2 - lse_2[:, None])
        if MASKED:
            rows = row_start + tl.arange(0, q.shape[0])
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            p = tl.where(visible_pairs(rows[:, None], columns[None, :], seqlen_k, causal_offset, CAUSAL), p, 0.0)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        tile = following
    return dq


@triton.jit
def walk_for_dkv(
    dk, dv, k, v, Q, Dout, Lse, Delta, indices, shift, first, stop, key_start, stride_qm, stride_dom, seqlen_q,
    seqlen_k, causal_offset, scale_log2,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, RAGGED_Q: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [BLOCK_N, WIDTH] / scale and dv [BLOCK_N, WIDTH_V] with the query tiles of steps first..stop-1 added.

    Scores are transposed, [BLOCK_N, BLOCK_M], so that no product needs its left operand turned round. A row past the
    end has a log-sum-exp of inf, and so no probability. A key past the end has rows of its own, which nobody reads.
    """
    tile = listed_tile(indices, first, shift)
    for step in tl.range(first, stop, num_stages=STAGES):
        following = listed_tile(indices, tl.minimum(step + 1, stop), shift)
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_matrix(Q, tile * BLOCK_M, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, RAGGED_Q)
        lse_2 = in_base_2(load_row_values(Lse, rows, seqlen_q, float("inf"), RAGGED_Q))
        # [BLOCK_N, BLOCK_M]
        p = at_most_one(tl.dot(k, q.T, input_precision=PRECISION) * scale_log2 - lse_2[None, :])
        if RAGGED_Q:  # an infinite key times the zeros of a row past the end is NaN
            p = tl.where(rows[None, :] < seqlen_q, p, 0.0)
        if MASKED:
            columns = key_start + tl.arange(0, k.shape[0])
            p = tl.where(visible_pairs(rows[None, :], columns[:, None], seqlen_k, causal_offset, CAUSAL), p, 0.0)
        dout = load_matrix(Dout, tile * BLOCK_M, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, RAGGED_Q)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = load_row_values(Delta, rows, seqlen_q, 0.0, RAGGED_Q)
        dp = tl.dot(v, dout.T, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        tile = following
    return dk, dv


@triton.jit(do_not_specialize=("num_heads", "seqlen_q"))
def delta_kernel(
    Out, Dout, Delta,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom,
    num_heads, seqlen_q,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Delta [batch, num_heads, seqlen_q] = rowsum(Dout * Out), float32."""
    stride_ob, stride_oh, stride_om = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    stride_dob, stride_doh, stride_dom = in_elements(stride_dob, stride_doh, stride_dom, UNIT)
    batch_head = tl.program_id(1)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tl.program_id(0) * BLOCK_M
    out_base = Out + batch * stride_ob + head * stride_oh
    dout_base = Dout + batch * stride_dob + head * stride_doh
    out = load_matrix(out_base, row_start, stride_om, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True).to(tl.float32)
    dout = load_matrix(dout_base, row_start, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True).to(tl.float32)
    rows = row_start + tl.arange(0, BLOCK_M)
    tl.store(Delta + batch_head.to(tl.int64) * seqlen_q + rows, tl.sum(out * dout, 1), mask=rows < seqlen_q)


@triton.jit(do_not_specialize=(*RUN_TIME_SIZES, *LIST_SIZES))
def dq_kernel(
    Q, K, V, Dout, Lse, Delta, Dq, Indices, Before, scale, scale_log2,
    stride_lb, stride_lh, stride_lr, num_blocks, row_shift, tile_shift,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of Dq for one (batch, head), with the lists of `BlockMask.rows`."""
    stride_qb, stride_qh, stride_qm = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    stride_dob, stride_doh, stride_dom = in_elements(stride_dob, stride_doh, stride_dom, UNIT)
    stride_dqb, stride_dqh, stride_dqm = in_elements(stride_dqb, stride_dqh, stride_dqm, UNIT)
    tile_m, batch_head = locate_tile(tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, CAUSAL)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tile_m * BLOCK_M
    listed = batch * stride_lb + head * stride_lh + (tile_m >> row_shift).to(tl.int64) * stride_lr
    full_tile, stop_tile = key_tiles(row_start, seqlen_k, causal_offset, BLOCK_M, BLOCK_N, CAUSAL)
    full = steps_before(Before + listed, full_tile, num_blocks, tile_shift)
    stop = steps_before(Before + listed, stop_tile, num_blocks, tile_shift)
    q_base = Q + batch * stride_qb + head * stride_qh
    dout_base = Dout + batch * stride_dob + head * stride_doh
    k_base = K + batch * stride_kb + head // group_size * stride_kh
    v_base = V + batch * stride_vb + head // group_size * stride_vh
    rows = row_start + tl.arange(0, BLOCK_M)
    row_values = batch_head.to(tl.int64) * seqlen_q
    lse_2 = in_base_2(load_row_values(Lse + row_values, rows, seqlen_q, float("inf"), True))
    delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, True)
    q = load_matrix(q_base, row_start, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    dout = load_matrix(dout_base, row_start, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    dq = walk_for_dq(
        dq, q, dout, lse_2, delta, k_base, v_base, Indices + listed, tile_shift, 0, full, row_start, stride_kn,
        stride_vn, seqlen_k, causal_offset, scale_log2,
        BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, CAUSAL, RAGGED_K, STAGES, PRECISION,
    )  # fmt: skip
    if CAUSAL or RAGGED_K:
        dq = walk_for_dq(
            dq, q, dout, lse_2, delta, k_base, v_base, Indices + listed, tile_shift, full, stop, row_start, stride_kn,
            stride_vn, seqlen_k, causal_offset, scale_log2,
            BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED_K, 1, PRECISION,
        )  # fmt: skip
    store_matrix(dq * scale, Dq + batch * stride_dqb + head * stride_dqh, row_start, stride_dqm, seqlen_q, HEAD_DIM)


@triton.jit
def query_tiles(key_start, seqlen_q, causal_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first, full) for causal attention: query tiles before first see none of the keys key_start..+BLOCK_N-1, those
    from full on see all of them."""
    stop = tl.cdiv(seqlen_q, BLOCK_M)
    first_row = tl.maximum(0, key_start - causal_offset)
    full_row = tl.maximum(0, key_start - causal_offset + BLOCK_N - 1)
    return tl.minimum(first_row // BLOCK_M, stop), tl.minimum(tl.cdiv(full_row, BLOCK_M), stop)


@triton.jit(do_not_specialize=(*RUN_TIME_SIZES, *LIST_SIZES))
def dkv_kernel(
    Q, K, V, Dout, Lse, Delta, Dk, Dv, Indices, Before, scale, scale_log2,
    stride_lb, stride_lh, stride_lr, num_blocks, row_shift, tile_shift,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_Q: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of Dk and Dv for one (batch, key head), with the lists of `BlockMask.columns`: there a row of blocks
    is a block of keys, so that row_shift belongs to keys and tile_shift to queries."""
    stride_qb, stride_qh, stride_qm = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    stride_dob, stride_doh, stride_dom = in_elements(stride_dob, stride_doh, stride_dom, UNIT)
    stride_dkb, stride_dkh, stride_dkn = in_elements(stride_dkb, stride_dkh, stride_dkn, UNIT)
    stride_dvb, stride_dvh, stride_dvn = in_elements(stride_dvb, stride_dvh, stride_dvn, UNIT)
    num_tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    tile_n = tl.program_id(0) % num_tiles_n
    heads_kv = num_heads // group_size
    batch = (tl.program_id(0) // num_tiles_n // heads_kv).to(tl.int64)
    head_kv = (tl.program_id(0) // num_tiles_n % heads_kv).to(tl.int64)
    key_start = tile_n * BLOCK_N
    k_base = K + batch * stride_kb + head_kv * stride_kh
    v_base = V + batch * stride_vb + head_kv * stride_vh
    k = load_matrix(k_base, key_start, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)
    v = load_matrix(v_base, key_start, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, True)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    for member in range(group_size):
        head = head_kv * group_size + member
        listed = batch * stride_lb + head * stride_lh + (tile_n >> row_shift).to(tl.int64) * stride_lr
        row_values = (batch * num_heads + head) * seqlen_q
        q_base = Q + batch * stride_qb + head * stride_qh
        dout_base = Dout + batch * stride_dob + head * stride_doh
        full = 0
        stop = steps_before(Before + listed, tl.cdiv(seqlen_q, BLOCK_M), num_blocks, tile_shift)
        if CAUSAL:
            first_tile, full_tile = query_tiles(key_start, seqlen_q, causal_offset, BLOCK_M, BLOCK_N)
            first = steps_before(Before + listed, first_tile, num_blocks, tile_shift)
            full = steps_before(Before + listed, full_tile, num_blocks, tile_shift)
            dk, dv = walk_for_dkv(
                dk, dv, k, v, q_base, dout_base, Lse + row_values, Delta + row_values, Indices + listed, tile_shift,
                first, full, key_start, stride_qm, stride_dom, seqlen_q, seqlen_k, causal_offset, scale_log2,
                BLOCK_M, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, True, CAUSAL, RAGGED_Q, 1, PRECISION,
            )  # fmt: skip
        dk, dv = walk_for_dkv(
            dk, dv, k, v, q_base, dout_base, Lse + row_values, Delta + row_values, Indices + listed, tile_shift,
            full, stop, key_start, stride_qm, stride_dom, seqlen_q, seqlen_k, causal_offset, scale_log2,
            BLOCK_M, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, CAUSAL, RAGGED_Q, STAGES, PRECISION,
        )  # fmt: skip
    store_matrix(dk * scale, Dk + batch * stride_dkb + head_kv * stride_dkh, key_start, stride_dkn, seqlen_k, HEAD_DIM)
    store_matrix(dv, Dv + batch * stride_dvb + head_kv * stride_dvh, key_start, stride_dvn, seqlen_k, HEAD_DIM_V)
