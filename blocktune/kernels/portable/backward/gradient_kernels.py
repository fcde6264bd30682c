"""The two passes of the dense backward: jitted functions, with the device functions of gradients.py.

`keys_kernel` owns keys and walks the queries that see them; it writes dk and dv and, if it is given sums, adds up dq.
`queries_kernel` owns queries and walks their keys for dq, so that nothing is added up between programs. Ahead of both,
`statistics_kernel` finds what float32 scores are compared with.
"""

import triton
import triton.language as tl

from blocktune.kernels.base.feature_arguments import RUN_TIME_INTEGERS
from blocktune.kernels.portable.backward.gradients import (
    gradients_of_keys,
    gradients_of_queries,
    row_statistics,
    statistics_of,
)
from blocktune.kernels.portable.backward.sparse_gradients import load_row_values, store_matrix
from blocktune.kernels.portable.forward.arguments import (
    Dropout,
    Keys,
    Matrix,
    Queries,
    QuerySums,
    QueryTile,
    Scoring,
    SequenceBounds,
)
from blocktune.kernels.portable.forward.scores import tile_range
from blocktune.kernels.portable.forward.tiles import in_elements, load_matrix, locate_tile


@triton.jit(do_not_specialize=RUN_TIME_INTEGERS)
def keys_kernel(
    Q, K, V, Dout, Lse, Delta, Dk, Dv, Sums, Mask, Slopes, CuQ, CuK, scale, softcap, kept_share, seed_lo, seed_hi,
    offset, threshold, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N rows of Dk and Dv for one key head, over all query heads that share it.

    Arguments are those of `flash_fwd_general_kernel`; Dout has the strides stride_g*, Lse and Delta stride_l* and one
    float32 for every query of a head. Sums: None, or dq / scale in float32 [batch, num_heads, rows, HEAD_DIM]
    contiguous, of zeros: a pointer (SUMS 1), or a descriptor of [batch * num_heads, rows, HEAD_DIM] (SUMS 2).
    batch_heads counts key heads.
    """
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    WIDTH_V: tl.constexpr = OPTIONS.WIDTH_V
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    v_strides = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    g_strides = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    dk_strides = in_elements(stride_dkb, stride_dkh, stride_dkn, UNIT)
    dv_strides = in_elements(stride_dvb, stride_dvh, stride_dvn, UNIT)
    num_tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    turned, batch_head_kv = locate_tile(tl.program_id(0), num_tiles_n, batch_heads, head_group, OPTIONS.CAUSAL)
    tile_n = num_tiles_n - 1 - turned if OPTIONS.CAUSAL else turned  # the first keys are seen by most queries
    heads_kv = num_heads // group_size
    batch = (batch_head_kv // heads_kv).to(tl.int64)
    head_kv = (batch_head_kv % heads_kv).to(tl.int64)
    key_start = tile_n * BLOCK_N
    entry = 0 if OPTIONS.PACKED else batch  # packed sequences are one entry of the tensors
    k_base = K + entry * k_strides.batch + head_kv * k_strides.head
    v_base = V + entry * v_strides.batch + head_kv * v_strides.head
    dk_base = Dk + entry * dk_strides.batch + head_kv * dk_strides.head
    dv_base = Dv + entry * dv_strides.batch + head_kv * dv_strides.head
    begin_q = 0
    if OPTIONS.PACKED:
        begin_q, begin_k = tl.load(CuQ + batch), tl.load(CuK + batch)
        seqlen_q = tl.load(CuQ + batch + 1) - begin_q
        seqlen_k = tl.load(CuK + batch + 1) - begin_k
        if key_start >= seqlen_k:
            return
        if not OPTIONS.UPPER_LEFT:
            diagonal = seqlen_k - seqlen_q
        k_base += begin_k.to(tl.int64) * k_strides.row
        v_base += begin_k.to(tl.int64) * v_strides.row
        dk_base += begin_k.to(tl.int64) * dk_strides.row
        dv_base += begin_k.to(tl.int64) * dv_strides.row
    sequence = SequenceBounds(seqlen_q, seqlen_k, diagonal, window_left, window_right)
    keys = Keys(Matrix(k_base, k_strides.row, seqlen_k), Matrix(v_base, v_strides.row, seqlen_k))
    # [BLOCK_N, WIDTH], [BLOCK_N, WIDTH_V]
    k = load_matrix(keys.k, key_start, BLOCK_N, OPTIONS.HEAD_DIM, WIDTH, OPTIONS.RAGGED)
    v = load_matrix(keys.v, key_start, BLOCK_N, OPTIONS.HEAD_DIM_V, WIDTH_V, OPTIONS.RAGGED)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    for member in range(group_size):
        head = head_kv * group_size + member
        row_values = entry * stride_lb + head * stride_lh + begin_q
        q_base = Q + entry * q_strides.batch + head * q_strides.head + tl.cast(begin_q, tl.int64) * q_strides.row
        dout_base = Dout + entry * g_strides.batch + head * g_strides.head + tl.cast(begin_q, tl.int64) * g_strides.row
        slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if OPTIONS.ALIBI else 0.0
        mask_base = Mask + batch * stride_mb + head * stride_mh if OPTIONS.MASK != 0 else None
        scoring = Scoring(scale, softcap, slope, mask_base, stride_mm, stride_mn)
        base = Sums + row_values * OPTIONS.HEAD_DIM if OPTIONS.SUMS == 1 else Sums
        queries = Queries(
            Matrix(q_base, q_strides.row, seqlen_q), Matrix(dout_base, g_strides.row, seqlen_q),
            Lse + row_values, Delta + row_values,
        )  # fmt: skip
        sums = QuerySums(base, (entry * num_heads + head).to(tl.int32), begin_q)
        dropout = Dropout(batch * num_heads + head, kept_share, seed_lo, seed_hi, offset, threshold)
        dk, dv = gradients_of_keys(dk, dv, k, v, queries, sums, key_start, sequence, scoring, dropout, OPTIONS)
    if OPTIONS.DROPOUT:
        dv = dv / kept_share
    store_matrix(dk * scale, Matrix(dk_base, dk_strides.row, seqlen_k), key_start, OPTIONS.HEAD_DIM)
    store_matrix(dv, Matrix(dv_base, dv_strides.row, seqlen_k), key_start, OPTIONS.HEAD_DIM_V)


@triton.jit(do_not_specialize=RUN_TIME_INTEGERS)
def queries_kernel(
    Q, K, V, Dout, Lse, Delta, Dq, Mask, Slopes, CuQ, CuK, scale, softcap, kept_share, seed_lo, seed_hi, offset,
    threshold, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dqb, stride_dqh, stride_dqm,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of Dq for one query head; arguments as in `keys_kernel`, batch_heads counts query heads."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    v_strides = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    g_strides = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    dq_strides = in_elements(stride_dqb, stride_dqh, stride_dqm, UNIT)
    tile_m, batch_head = locate_tile(
        tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, OPTIONS.CAUSAL
    )
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    row_start = tile_m * BLOCK_M
    entry = 0 if OPTIONS.PACKED else batch
    q_base = Q + entry * q_strides.batch + head * q_strides.head
    dout_base = Dout + entry * g_strides.batch + head * g_strides.head
    k_base = K + entry * k_strides.batch + head_kv * k_strides.head
    v_base = V + entry * v_strides.batch + head_kv * v_strides.head
    dq_base = Dq + entry * dq_strides.batch + head * dq_strides.head
    row_values = entry * stride_lb + head * stride_lh
    if OPTIONS.PACKED:
        begin_q, begin_k = tl.load(CuQ + batch), tl.load(CuK + batch)
        seqlen_q = tl.load(CuQ + batch + 1) - begin_q
        seqlen_k = tl.load(CuK + batch + 1) - begin_k
        if row_start >= seqlen_q:
            return
        if not OPTIONS.UPPER_LEFT:
            diagonal = seqlen_k - seqlen_q
        q_base += begin_q.to(tl.int64) * q_strides.row
        dout_base += begin_q.to(tl.int64) * g_strides.row
        k_base += begin_k.to(tl.int64) * k_strides.row
        v_base += begin_k.to(tl.int64) * v_strides.row
        dq_base += begin_q.to(tl.int64) * dq_strides.row
        row_values += begin_q
    slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if OPTIONS.ALIBI else 0.0
    mask_base = Mask + batch * stride_mb + head * stride_mh if OPTIONS.MASK != 0 else None
    rows = row_start + tl.arange(0, BLOCK_M)
    lse = load_row_values(Lse + row_values, rows, seqlen_q, float("inf"), True)
    delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, True)
    # [BLOCK_M, WIDTH], [BLOCK_M, WIDTH_V]
    queries = Matrix(q_base, q_strides.row, seqlen_q)
    q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    douts = Matrix(dout_base, g_strides.row, seqlen_q)
    dout = load_matrix(douts, row_start, BLOCK_M, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, True)
    owned = QueryTile(q, dout, statistics_of(lse, q.dtype, OPTIONS.BIASED), delta)
    keys = Keys(Matrix(k_base, k_strides.row, seqlen_k), Matrix(v_base, v_strides.row, seqlen_k))
    sequence = SequenceBounds(seqlen_q, seqlen_k, diagonal, window_left, window_right)
    scoring = Scoring(scale, softcap, slope, mask_base, stride_mm, stride_mn)
    dropout = Dropout(batch_head, kept_share, seed_lo, seed_hi, offset, threshold)
    dq = gradients_of_queries(owned, keys, row_start, sequence, scoring, dropout, OPTIONS)
    store_matrix(dq * scale, Matrix(dq_base, dq_strides.row, seqlen_q), row_start, OPTIONS.HEAD_DIM)


@triton.jit(do_not_specialize=RUN_TIME_INTEGERS)
def statistics_kernel(
    Q, K, V, Dout, Highest, Delta, Divided, Mask, Slopes, CuQ, CuK, scale, softcap, kept_share, seed_lo, seed_hi,
    offset, threshold, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_db, stride_dh, stride_dm,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    OPTIONS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the row maxima that stand in the place of the log-sum-exp to Highest, float32 like Delta, inf for a row
    without keys; to Divided and Delta, Dout and Delta over the row sums that belong to these maxima. Arguments as in
    `queries_kernel`; V and what dropout needs are not read."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    q_strides = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    k_strides = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    g_strides = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    d_strides = in_elements(stride_db, stride_dh, stride_dm, UNIT)
    tile_m, batch_head = locate_tile(
        tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, OPTIONS.CAUSAL
    )
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tile_m * BLOCK_M
    entry = 0 if OPTIONS.PACKED else batch
    q_base = Q + entry * q_strides.batch + head * q_strides.head
    k_base = K + entry * k_strides.batch + head // group_size * k_strides.head
    dout_base = Dout + entry * g_strides.batch + head * g_strides.head
    divided_base = Divided + entry * d_strides.batch + head * d_strides.head
    row_values = entry * stride_lb + head * stride_lh
    if OPTIONS.PACKED:
        begin_q, begin_k = tl.load(CuQ + batch), tl.load(CuK + batch)
        seqlen_q = tl.load(CuQ + batch + 1) - begin_q
        seqlen_k = tl.load(CuK + batch + 1) - begin_k
        if row_start >= seqlen_q:
            return
        if not OPTIONS.UPPER_LEFT:
            diagonal = seqlen_k - seqlen_q
        q_base += begin_q.to(tl.int64) * q_strides.row
        k_base += begin_k.to(tl.int64) * k_strides.row
        dout_base += begin_q.to(tl.int64) * g_strides.row
        divided_base += begin_q.to(tl.int64) * d_strides.row
        row_values += begin_q
    slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if OPTIONS.ALIBI else 0.0
    mask_base = Mask + batch * stride_mb + head * stride_mh if OPTIONS.MASK != 0 else None
    # [BLOCK_M, WIDTH]
    queries = Matrix(q_base, q_strides.row, seqlen_q)
    q = load_matrix(queries, row_start, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
    keys = Matrix(k_base, k_strides.row, seqlen_k)
    sequence = SequenceBounds(seqlen_q, seqlen_k, diagonal, window_left, window_right)
    scoring = Scoring(scale, softcap, slope, mask_base, stride_mm, stride_mn)
    first, stop = tile_range(row_start, sequence, OPTIONS)
    highest, total = row_statistics(q, keys, first, stop, row_start, sequence, scoring, OPTIONS)
    rows = row_start + tl.arange(0, BLOCK_M)
    tl.store(Highest + row_values + rows, tl.where(total == 0.0, float("inf"), highest), mask=rows < seqlen_q)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, True)
    tl.store(Delta + row_values + rows, delta * inverse, mask=rows < seqlen_q)
    douts = Matrix(dout_base, g_strides.row, seqlen_q)
    dout = load_matrix(douts, row_start, BLOCK_M, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, True)
    divided = Matrix(divided_base, d_strides.row, seqlen_q)
    store_matrix(dout * inverse[:, None], divided, row_start, OPTIONS.HEAD_DIM_V)
