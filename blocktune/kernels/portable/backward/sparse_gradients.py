"""Gradients of block-sparse attention: device functions.

With p = exp2(score - lse) recomputed from the saved log-sum-exp, and delta = rowsum(dout * out):

    dv = p^T dout        ds = p * (dout v^T - delta)        dq = scale * ds k        dk = scale * ds^T q

(FlashAttention, arXiv 2205.14135, algorithm 4, cut into one pass for dq and one for dk and dv as FlashAttention-2 does,
so that nothing is added up between programs and every run gives the same bits).
"""

import triton
import triton.language as tl

from blocktune.kernels.base.flash_kernel import RUN_TIME_SIZES
from blocktune.kernels.portable.forward.arguments import (
    BlockList,
    Keys,
    Matrix,
    Queries,
    QueryTile,
    SequenceBounds,
)
from blocktune.kernels.portable.forward.sparse_tiles import LIST_SIZES, listed_tile, steps_before
from blocktune.kernels.portable.forward.tiles import in_elements, key_tiles, load_matrix, locate_tile


@triton.jit
def load_row_values(base, rows, seqlen_q, other, CHECK_ROWS: tl.constexpr):
    """Return one float32 of every row [BLOCK_M], `other` past the end."""
    if CHECK_ROWS:
        return tl.load(base + rows, mask=rows < seqlen_q, other=other)
    else:
        return tl.load(base + rows)


@triton.jit
def limit_exp2(exponents, highest=0.0):
    """Return 2 to these exponents, which rounding alone makes greater than the `highest`: probabilities. NaN stays
    NaN."""
    return tl.exp2(tl.minimum(exponents, highest, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def convert_to_base_2(lse):
    """Return the log-sum-exp in base 2; inf for a row without keys, which leaves it no probability."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def store_matrix(tile, matrix, row, DIM: tl.constexpr):
    """Write [BLOCK, WIDTH] to rows row.. of a `Matrix` of DIM columns."""
    rows = row + tl.arange(0, tile.shape[0])
    columns = tl.arange(0, tile.shape[1])
    pointers = matrix.base + rows.to(tl.int64)[:, None] * matrix.stride + columns[None, :]
    inside = (rows[:, None] < matrix.rows) & (columns[None, :] < DIM)
    tl.store(pointers, tile.to(matrix.base.dtype.element_ty), mask=inside)


@triton.jit
def visible_pairs(rows, columns, sequence, OPTIONS: tl.constexpr):
    """Return whether each query sees each key, for rows and columns that broadcast against each other."""
    visible = columns < sequence.seqlen_k
    if OPTIONS.CAUSAL:
        visible = visible & (columns <= rows + sequence.diagonal)
    return visible


@triton.jit
def walk_for_dq(
    dq, owned, keys, blocks, first, stop, row_start, sequence, scale_log2,
    MASKED: tl.constexpr, STAGES: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Return dq [BLOCK_M, WIDTH] / scale of a `QueryTile` with the key tiles of steps first..stop-1 added. Its
    statistics are log-sum-exps in base 2."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    CHECK_KEYS: tl.constexpr = MASKED and OPTIONS.RAGGED
    q, dout, lse_2, delta = owned
    tile = listed_tile(blocks, first)
    for step in tl.range(first, stop, num_stages=STAGES):
        following = listed_tile(blocks, tl.minimum(step + 1, stop))
        k = load_matrix(keys.k, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, CHECK_KEYS)
        v = load_matrix(keys.v, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, CHECK_KEYS)
        # [BLOCK_M, BLOCK_N]
        p = limit_exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale_log2 - lse_2[:, None])
        if MASKED:
            rows = row_start + tl.arange(0, q.shape[0])
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            p = tl.where(visible_pairs(rows[:, None], columns[None, :], sequence, OPTIONS), p, 0.0)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        tile = following
    return dq


@triton.jit
def walk_for_dkv(
    dk, dv, k, v, queries, blocks, first, stop, key_start, sequence, scale_log2,
    MASKED: tl.constexpr, STAGES: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Return dk [BLOCK_N, WIDTH] / scale and dv [BLOCK_N, WIDTH_V] with the query tiles of steps first..stop-1 added.

    Scores are transposed, [BLOCK_N, BLOCK_M], so that no product needs its left operand turned round. A row past the
    end has a log-sum-exp of inf, and so no probability. A key past the end has rows of its own, which nobody reads.
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    RAGGED: tl.constexpr = OPTIONS.RAGGED
    seqlen_q = sequence.seqlen_q
    tile = listed_tile(blocks, first)
    for step in tl.range(first, stop, num_stages=STAGES):
        following = listed_tile(blocks, tl.minimum(step + 1, stop))
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_matrix(queries.q, tile * BLOCK_M, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, RAGGED)
        lse_2 = convert_to_base_2(load_row_values(queries.lse, rows, seqlen_q, float("inf"), RAGGED))
        # [BLOCK_N, BLOCK_M]
        p = limit_exp2(tl.dot(k, q.T, input_precision=PRECISION) * scale_log2 - lse_2[None, :])
        if RAGGED:  # an infinite key times the zeros of a row past the end is NaN
            p = tl.where(rows[None, :] < seqlen_q, p, 0.0)
        if MASKED:
            columns = key_start + tl.arange(0, k.shape[0])
            p = tl.where(visible_pairs(rows[None, :], columns[:, None], sequence, OPTIONS), p, 0.0)
        dout = load_matrix(queries.dout, tile * BLOCK_M, BLOCK_M, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, RAGGED)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = load_row_values(queries.delta, rows, seqlen_q, 0.0, RAGGED)
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
    """Write rowsum(Dout * Out), float32, to Delta [batch, num_heads, seqlen_q]."""
    o_strides = in_elements(stride_ob, stride_oh, stride_om, UNIT)
    do_strides = in_elements(stride_dob, stride_doh, stride_dom, UNIT)
    batch_head = tl.program_id(1)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tl.program_id(0) * BLOCK_M
    outs = Matrix(Out + batch * o_strides.batch + head * o_strides.head, o_strides.row, seqlen_q)
    douts = Matrix(Dout + batch * do_strides.batch + head * do_strides.head, do_strides.row, seqlen_q)
    out = load_matrix(outs, row_start, BLOCK_M, HEAD_DIM_V, WIDTH_V, True).to(tl.float32)
    dout = load_matrix(douts, row_start, BLOCK_M, HEAD_DIM_V, WIDTH_V, True).to(tl.float32)
    rows = row_start + tl.arange(0, BLOCK_M)
    tl.store(Delta + batch_head.to(tl.int64) * seqlen_q + rows, tl.sum(out * dout, 1), mask=rows < seqlen_q)


@triton.jit(do_not_specialize=(*RUN_TIME_SIZES, *LIST_SIZES))
def dq_kernel(
    Q, K, V, Dout, Lse, Delta, Dq, Indices, Before, scale, scale_log2,
    stride_lb, stride_lh, stride_lr, num_blocks, row_shift, tile_shift,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of Dq for one (batch, head), with the lists of `BlockMask.rows`."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    v_strides = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    do_strides = in_elements(stride_dob, stride_doh, stride_dom, UNIT)
    dq_strides = in_elements(stride_dqb, stride_dqh, stride_dqm, UNIT)
    tile_m, batch_head = locate_tile(
        tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, OPTIONS.CAUSAL
    )
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tile_m * BLOCK_M
    sequence = SequenceBounds(seqlen_q, seqlen_k, causal_offset)
    listed = batch * stride_lb + head * stride_lh + (tile_m >> row_shift).to(tl.int64) * stride_lr
    full_tile, stop_tile = key_tiles(row_start, sequence, OPTIONS)
    full = steps_before(Before + listed, full_tile, num_blocks, tile_shift)
    stop = steps_before(Before + listed, stop_tile, num_blocks, tile_shift)
    queries = Matrix(Q + batch * q_strides.batch + head * q_strides.head, q_strides.row, seqlen_q)
    douts = Matrix(Dout + batch * do_strides.batch + head * do_strides.head, do_strides.row, seqlen_q)
    k_base = K + batch * k_strides.batch + head // group_size * k_strides.head
    v_base = V + batch * v_strides.batch + head // group_size * v_strides.head
    keys = Keys(Matrix(k_base, k_strides.row, seqlen_k), Matrix(v_base, v_strides.row, seqlen_k))
    rows = row_start + tl.arange(0, BLOCK_M)
    row_values = batch_head.to(tl.int64) * seqlen_q
    lse_2 = convert_to_base_2(load_row_values(Lse + row_values, rows, seqlen_q, float("inf"), True))
    delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, True)
    q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    dout = load_matrix(douts, row_start, BLOCK_M, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, True)
    owned, blocks = QueryTile(q, dout, lse_2, delta), BlockList(Indices + listed, tile_shift)
    dq = tl.zeros(q.shape, tl.float32)
    dq = walk_for_dq(dq, owned, keys, blocks, 0, full, row_start, sequence, scale_log2, False, OPTIONS.STAGES, OPTIONS)
    if OPTIONS.CAUSAL or OPTIONS.RAGGED:
        dq = walk_for_dq(dq, owned, keys, blocks, full, stop, row_start, sequence, scale_log2, True, 1, OPTIONS)
    dq_base = Dq + batch * dq_strides.batch + head * dq_strides.head
    store_matrix(dq * scale, Matrix(dq_base, dq_strides.row, seqlen_q), row_start, OPTIONS.HEAD_DIM)


@triton.jit
def query_tiles(key_start, sequence, OPTIONS: tl.constexpr):
    """Return (first, full) for causal attention: query tiles before first see none of the keys
    key_start..+BLOCK_N-1, those from full on see all of them."""
    stop = tl.cdiv(sequence.seqlen_q, OPTIONS.BLOCK_M)
    first_row = tl.maximum(0, key_start - sequence.diagonal)
    full_row = tl.maximum(0, key_start - sequence.diagonal + OPTIONS.BLOCK_N - 1)
    return tl.minimum(first_row // OPTIONS.BLOCK_M, stop), tl.minimum(tl.cdiv(full_row, OPTIONS.BLOCK_M), stop)


@triton.jit(do_not_specialize=(*RUN_TIME_SIZES, *LIST_SIZES))
def dkv_kernel(
    Q, K, V, Dout, Lse, Delta, Dk, Dv, Indices, Before, scale, scale_log2,
    stride_lb, stride_lh, stride_lr, num_blocks, row_shift, tile_shift,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, causal_offset,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of Dk and Dv for one (batch, key head), with the lists of `BlockMask.columns`: there a row
    of blocks is a block of keys, so that row_shift belongs to keys and tile_shift to queries."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    WIDTH_V: tl.constexpr = OPTIONS.WIDTH_V
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    v_strides = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    do_strides = in_elements(stride_dob, stride_doh, stride_dom, UNIT)
    dk_strides = in_elements(stride_dkb, stride_dkh, stride_dkn, UNIT)
    dv_strides = in_elements(stride_dvb, stride_dvh, stride_dvn, UNIT)
    num_tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    tile_n = tl.program_id(0) % num_tiles_n
    heads_kv = num_heads // group_size
    batch = (tl.program_id(0) // num_tiles_n // heads_kv).to(tl.int64)
    head_kv = (tl.program_id(0) // num_tiles_n % heads_kv).to(tl.int64)
    key_start = tile_n * BLOCK_N
    sequence = SequenceBounds(seqlen_q, seqlen_k, causal_offset)
    k_base = K + batch * k_strides.batch + head_kv * k_strides.head
    v_base = V + batch * v_strides.batch + head_kv * v_strides.head
    k = load_matrix(Matrix(k_base, k_strides.row, seqlen_k), key_start, BLOCK_N, OPTIONS.HEAD_DIM, WIDTH, True)
    v = load_matrix(Matrix(v_base, v_strides.row, seqlen_k), key_start, BLOCK_N, OPTIONS.HEAD_DIM_V, WIDTH_V, True)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    for member in range(group_size):
        head = head_kv * group_size + member
        listed = batch * stride_lb + head * stride_lh + (tile_n >> row_shift).to(tl.int64) * stride_lr
        row_values = (batch * num_heads + head) * seqlen_q
        q_base = Q + batch * q_strides.batch + head * q_strides.head
        dout_base = Dout + batch * do_strides.batch + head * do_strides.head
        first, full = 0, 0
        stop = steps_before(Before + listed, tl.cdiv(seqlen_q, OPTIONS.BLOCK_M), num_blocks, tile_shift)
        if OPTIONS.CAUSAL:
            first_tile, full_tile = query_tiles(key_start, sequence, OPTIONS)
            first = steps_before(Before + listed, first_tile, num_blocks, tile_shift)
            full = steps_before(Before + listed, full_tile, num_blocks, tile_shift)
        queries = Queries(
            Matrix(q_base, q_strides.row, seqlen_q), Matrix(dout_base, do_strides.row, seqlen_q),
            Lse + row_values, Delta + row_values,
        )  # fmt: skip
        blocks = BlockList(Indices + listed, tile_shift)
        if OPTIONS.CAUSAL:
            dk, dv = walk_for_dkv(
                dk, dv, k, v, queries, blocks, first, full, key_start, sequence, scale_log2, True, 1, OPTIONS
            )
        dk, dv = walk_for_dkv(
            dk, dv, k, v, queries, blocks, full, stop, key_start, sequence, scale_log2, False, OPTIONS.STAGES, OPTIONS
        )
    dk_base = Dk + batch * dk_strides.batch + head_kv * dk_strides.head
    store_matrix(dk * scale, Matrix(dk_base, dk_strides.row, seqlen_k), key_start, OPTIONS.HEAD_DIM)
    dv_base = Dv + batch * dv_strides.batch + head_kv * dv_strides.head
    store_matrix(dv, Matrix(dv_base, dv_strides.row, seqlen_k), key_start, OPTIONS.HEAD_DIM_V)
