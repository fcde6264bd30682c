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
from blocktune.kernels.portable.forward.scores import tile_range
from blocktune.kernels.portable.forward.tiles import in_elements, load_matrix, locate_tile


@triton.jit(do_not_specialize=RUN_TIME_INTEGERS)
def keys_kernel(
    Q, K, V, Dout, Lse, Delta, Dk, Dv, Sums, Mask, Slopes, CuQ, CuK, scale, softcap, kept_share, seed_lo, seed_hi,
    offset, threshold, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, UPPER_LEFT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, RAGGED: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of Dk and Dv for one key head, over all query heads that share it.

    Arguments are those of `flash_fwd_general_kernel`; Dout has the strides stride_g*, Lse and Delta stride_l* and one
    float32 for every query of a head. Sums: None, or dq / scale in float32 [batch, num_heads, rows, HEAD_DIM]
    contiguous, of zeros: a pointer (SUMS 1), or a descriptor of [batch * num_heads, rows, HEAD_DIM] (SUMS 2).
    batch_heads counts key heads.
    """
    stride_qb, stride_qh, stride_qm = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    stride_gb, stride_gh, stride_gm = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    stride_dkb, stride_dkh, stride_dkn = in_elements(stride_dkb, stride_dkh, stride_dkn, UNIT)
    stride_dvb, stride_dvh, stride_dvn = in_elements(stride_dvb, stride_dvh, stride_dvn, UNIT)
    num_tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    turned, batch_head_kv = locate_tile(tl.program_id(0), num_tiles_n, batch_heads, head_group, CAUSAL)
    tile_n = num_tiles_n - 1 - turned if CAUSAL else turned  # the first keys are seen by most queries
    heads_kv = num_heads // group_size
    batch = (batch_head_kv // heads_kv).to(tl.int64)
    head_kv = (batch_head_kv % heads_kv).to(tl.int64)
    key_start = tile_n * BLOCK_N
    entry = batch if CuQ is None else 0  # packed sequences are one entry of the tensors
    k_base = K + entry * stride_kb + head_kv * stride_kh
    v_base = V + entry * stride_vb + head_kv * stride_vh
    dk_base = Dk + entry * stride_dkb + head_kv * stride_dkh
    dv_base = Dv + entry * stride_dvb + head_kv * stride_dvh
    begin_q = 0
    if CuQ is not None:
        begin_q, begin_k = tl.load(CuQ + batch), tl.load(CuK + batch)
        seqlen_q = tl.load(CuQ + batch + 1) - begin_q
        seqlen_k = tl.load(CuK + batch + 1) - begin_k
        if key_start >= seqlen_k:
            return
        if not UPPER_LEFT:
            diagonal = seqlen_k - seqlen_q
        k_base += begin_k.to(tl.int64) * stride_kn
        v_base += begin_k.to(tl.int64) * stride_vn
        dk_base += begin_k.to(tl.int64) * stride_dkn
        dv_base += begin_k.to(tl.int64) * stride_dvn
    # [BLOCK_N, WIDTH], [BLOCK_N, WIDTH_V]
    k = load_matrix(k_base, key_start, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, RAGGED)
    v = load_matrix(v_base, key_start, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, RAGGED)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    for member in range(group_size):
        head = head_kv * group_size + member
        row_values = entry * stride_lb + head * stride_lh + begin_q
        q_base = Q + entry * stride_qb + head * stride_qh + tl.cast(begin_q, tl.int64) * stride_qm
        dout_base = Dout + entry * stride_gb + head * stride_gh + tl.cast(begin_q, tl.int64) * stride_gm
        slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if ALIBI else 0.0
        mask_base = Mask + batch * stride_mb + head * stride_mh if MASK != 0 else None
        sums = Sums + row_values * HEAD_DIM if SUMS == 1 else Sums
        dk, dv = gradients_of_keys(
            dk, dv, k, v, q_base, dout_base, Lse + row_values, Delta + row_values, sums,
            (entry * num_heads + head).to(tl.int32), begin_q, key_start, stride_qm, stride_gm, mask_base, stride_mm,
            stride_mn, slope, scale, softcap, kept_share, batch * num_heads + head, seed_lo, seed_hi, offset, threshold,
            seqlen_q, seqlen_k, diagonal, window_left, window_right,
            BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, DROPOUT,
            RAGGED, CuQ is not None, SUMS, STAGES, PRECISION,
        )  # fmt: skip
    if DROPOUT:
        dv = dv / kept_share
    store_matrix(dk * scale, dk_base, key_start, stride_dkn, seqlen_k, HEAD_DIM)
    store_matrix(dv, dv_base, key_start, stride_dvn, seqlen_k, HEAD_DIM_V)


@triton.jit(do_not_specialize=RUN_TIME_INTEGERS)
def queries_kernel(
    Q, K, V, Dout, Lse, Delta, Dq, Mask, Slopes, CuQ, CuK, scale, softcap, kept_share, seed_lo, seed_hi, offset,
    threshold, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_dqb, stride_dqh, stride_dqm,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, UPPER_LEFT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of Dq for one query head; arguments as in `keys_kernel`, batch_heads counts query heads."""
    stride_qb, stride_qh, stride_qm = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    stride_vb, stride_vh, stride_vn = in_elements(stride_vb, stride_vh, stride_vn, UNIT)
    stride_gb, stride_gh, stride_gm = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    stride_dqb, stride_dqh, stride_dqm = in_elements(stride_dqb, stride_dqh, stride_dqm, UNIT)
    tile_m, batch_head = locate_tile(tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, CAUSAL)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    row_start = tile_m * BLOCK_M
    entry = batch if CuQ is None else 0
    q_base = Q + entry * stride_qb + head * stride_qh
    dout_base = Dout + entry * stride_gb + head * stride_gh
    k_base = K + entry * stride_kb + head_kv * stride_kh
    v_base = V + entry * stride_vb + head_kv * stride_vh
    dq_base = Dq + entry * stride_dqb + head * stride_dqh
    row_values = entry * stride_lb + head * stride_lh
    if CuQ is not None:
        begin_q, begin_k = tl.load(CuQ + batch), tl.load(CuK + batch)
        seqlen_q = tl.load(CuQ + batch + 1) - begin_q
        seqlen_k = tl.load(CuK + batch + 1) - begin_k
        if row_start >= seqlen_q:
            return
        if not UPPER_LEFT:
            diagonal = seqlen_k - seqlen_q
        q_base += begin_q.to(tl.int64) * stride_qm
        dout_base += begin_q.to(tl.int64) * stride_gm
        k_base += begin_k.to(tl.int64) * stride_kn
        v_base += begin_k.to(tl.int64) * stride_vn
        dq_base += begin_q.to(tl.int64) * stride_dqm
        row_values += begin_q
    slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if ALIBI else 0.0
    mask_base = Mask + batch * stride_mb + head * stride_mh if MASK != 0 else None
    rows = row_start + tl.arange(0, BLOCK_M)
    lse = load_row_values(Lse + row_values, rows, seqlen_q, float("inf"), True)
    delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, True)
    # [BLOCK_M, WIDTH], [BLOCK_M, WIDTH_V]
    q = load_matrix(q_base, row_start, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    dout = load_matrix(dout_base, row_start, stride_gm, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
    dq = gradients_of_queries(
        q, dout, statistics_of(lse, q.dtype, SOFTCAP or ALIBI or MASK == 2), delta, k_base, v_base, row_start,
        stride_kn, stride_vn, mask_base, stride_mm, stride_mn, slope, scale, softcap, kept_share, batch_head, seed_lo,
        seed_hi, offset, threshold, seqlen_q, seqlen_k, diagonal, window_left, window_right,
        BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, DROPOUT, RAGGED,
        STAGES, PRECISION,
    )  # fmt: skip
    store_matrix(dq * scale, dq_base, row_start, stride_dqm, seqlen_q, HEAD_DIM)


@triton.jit(do_not_specialize=RUN_TIME_INTEGERS)
def statistics_kernel(
    Q, K, V, Dout, Highest, Delta, Divided, Mask, Slopes, CuQ, CuK, scale, softcap, kept_share, seed_lo, seed_hi,
    offset, threshold, stride_mb, stride_mh, stride_mm, stride_mn, stride_sb, stride_sh, stride_lb, stride_lh,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_db, stride_dh, stride_dm,
    num_heads, group_size, batch_heads, head_group, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, UPPER_LEFT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Highest, float32 like Delta: the row maxima that stand in the place of the log-sum-exp, inf for a row without
    keys. Divided and Delta: Dout and Delta over the row sums that belong to these maxima. Arguments as in
    `queries_kernel`; V and what dropout needs are not read."""
    stride_qb, stride_qh, stride_qm = in_elements(stride_qb, stride_qh, stride_qm, UNIT)
    stride_kb, stride_kh, stride_kn = in_elements(stride_kb, stride_kh, stride_kn, UNIT)
    stride_gb, stride_gh, stride_gm = in_elements(stride_gb, stride_gh, stride_gm, UNIT)
    stride_db, stride_dh, stride_dm = in_elements(stride_db, stride_dh, stride_dm, UNIT)
    tile_m, batch_head = locate_tile(tl.program_id(0), tl.cdiv(seqlen_q, BLOCK_M), batch_heads, head_group, CAUSAL)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_start = tile_m * BLOCK_M
    entry = batch if CuQ is None else 0
    q_base = Q + entry * stride_qb + head * stride_qh
    k_base = K + entry * stride_kb + head // group_size * stride_kh
    dout_base = Dout + entry * stride_gb + head * stride_gh
    divided_base = Divided + entry * stride_db + head * stride_dh
    row_values = entry * stride_lb + head * stride_lh
    if CuQ is not None:
        begin_q, begin_k = tl.load(CuQ + batch), tl.load(CuK + batch)
        seqlen_q = tl.load(CuQ + batch + 1) - begin_q
        seqlen_k = tl.load(CuK + batch + 1) - begin_k
        if row_start >= seqlen_q:
            return
        if not UPPER_LEFT:
            diagonal = seqlen_k - seqlen_q
        q_base += begin_q.to(tl.int64) * stride_qm
        k_base += begin_k.to(tl.int64) * stride_kn
        dout_base += begin_q.to(tl.int64) * stride_gm
        divided_base += begin_q.to(tl.int64) * stride_dm
        row_values += begin_q
    slope = tl.load(Slopes + batch * stride_sb + head * stride_sh) if ALIBI else 0.0
    mask_base = Mask + batch * stride_mb + head * stride_mh if MASK != 0 else None
    # [BLOCK_M, WIDTH]
    q = load_matrix(q_base, row_start, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    first, stop = tile_range(
        row_start, BLOCK_M, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, CAUSAL, WINDOW
    )
    highest, total = row_statistics(
        q, k_base, first, stop, row_start, stride_kn, mask_base, stride_mm, stride_mn, slope, scale, softcap, seqlen_q,
        seqlen_k, diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, WIDTH, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK,
        PRECISION,
    )  # fmt: skip
    rows = row_start + tl.arange(0, BLOCK_M)
    tl.store(Highest + row_values + rows, tl.where(total == 0.0, float("inf"), highest), mask=rows < seqlen_q)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    delta = load_row_values(Delta + row_values, rows, seqlen_q, 0.0, True)
    tl.store(Delta + row_values + rows, delta * inverse, mask=rows < seqlen_q)
    dout = load_matrix(dout_base, row_start, stride_gm, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
    store_matrix(dout * inverse[:, None], divided_base, row_start, stride_dm, seqlen_q, HEAD_DIM_V)
