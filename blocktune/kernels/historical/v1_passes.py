"""The passes of FlashAttention's first algorithm over one head, in Triton (`kernels/historical/v1.py`)."""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.arguments import Matrix
from blocktune.kernels.portable.forward.tiles import load_matrix, mask_scores

SIZES = ("num_heads", "group_size", "seqlen_q", "seqlen_k", "causal_offset")
"""Integers that are not compiled in."""


@triton.jit
def first_values(
    acc_base, sums, maxima, stride_am, seqlen_q, HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Line 2 of the algorithm: output 0, sums 0, maxima -inf, for all rows of a head."""
    columns = tl.arange(0, WIDTH_V)
    for row_start in tl.range(0, seqlen_q, BLOCK_M, num_stages=1):
        rows = row_start + tl.arange(0, BLOCK_M)
        there = rows < seqlen_q
        pointers = acc_base + rows.to(tl.int64)[:, None] * stride_am + columns[None, :]
        tl.store(pointers, tl.zeros([BLOCK_M, WIDTH_V], tl.float32), there[:, None] & (columns[None, :] < HEAD_DIM_V))
        tl.store(sums + rows, tl.zeros([BLOCK_M], tl.float32), there)
        tl.store(maxima + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), there)


@triton.jit
def update_rows(
    q, k, v, acc_base, sums, maxima, row_start, tile, stride_am, seqlen_q, seqlen_k, causal_offset, scale_log2,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Lines 8 to 13 for q [BLOCK_M, WIDTH] and one tile of keys: the rows of output, sums and maxima as they are with
    these keys too. Exponents are in base 2. Rows that have seen no key keep a maximum of -inf, a sum and output of 0.
    """
    rows = row_start + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, WIDTH_V)
    there = rows < seqlen_q
    # [BLOCK_M, BLOCK_N]
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        scores = mask_scores(scores, row_start, tile, seqlen_k, causal_offset, CAUSAL)
    m_old = tl.load(maxima + rows, there, other=0.0)
    l_old = tl.load(sums + rows, there, other=0.0)
    # [BLOCK_M, WIDTH_V]
    out = load_matrix(Matrix(acc_base, stride_am, seqlen_q), row_start, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
    m_tile = tl.max(scores, 1) * scale_log2
    m_new = tl.maximum(m_old, m_tile)
    # -inf minus -inf would be NaN
    p = tl.exp2(scores * scale_log2 - tl.where(m_tile == float("-inf"), 0.0, m_tile)[:, None])
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    of_old = l_old * tl.exp2(m_old - reference)
    of_tile = tl.exp2(m_tile - reference)
    l_new = of_old + of_tile * tl.sum(p, 1)
    product = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    divisor = tl.where(l_new == 0.0, 1.0, l_new)
    out = (of_old[:, None] * out + of_tile[:, None] * product) / divisor[:, None]
    pointers = acc_base + rows.to(tl.int64)[:, None] * stride_am + columns[None, :]
    tl.store(pointers, out, there[:, None] & (columns[None, :] < HEAD_DIM_V))
    tl.store(sums + rows, l_new, there)
    tl.store(maxima + rows, m_new, there)


@triton.jit
def last_values(
    acc_base, sums, maxima, out_base, lse_base, stride_am, stride_om, seqlen_q,
    HEAD_DIM_V: tl.constexpr, WIDTH_V: tl.constexpr, CONVERT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the paper leaves to the caller: the output in its own data type if that is not float32, and the natural
    log-sum-exp unless lse_base is None."""
    ln_2: tl.constexpr = 0.6931471805599453
    columns = tl.arange(0, WIDTH_V)
    for row_start in tl.range(0, seqlen_q, BLOCK_M, num_stages=1):
        rows = row_start + tl.arange(0, BLOCK_M)
        there = rows < seqlen_q
        if CONVERT:
            out = load_matrix(Matrix(acc_base, stride_am, seqlen_q), row_start, BLOCK_M, HEAD_DIM_V, WIDTH_V, True)
            pointers = out_base + rows.to(tl.int64)[:, None] * stride_om + columns[None, :]
            tl.store(pointers, out.to(out_base.dtype.element_ty), there[:, None] & (columns[None, :] < HEAD_DIM_V))
        if lse_base is not None:
            total = tl.load(sums + rows, there, other=1.0)
            maximum = tl.load(maxima + rows, there, other=0.0)
            lse = (maximum + tl.log2(tl.where(total == 0.0, 1.0, total))) * ln_2
            tl.store(lse_base + rows, tl.where(total == 0.0, float("-inf"), lse), there)


@triton.jit(do_not_specialize=SIZES)
def flash_v1_kernel(
    Q, K, V, Out, Lse, Acc, Sums, Maxima, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_ab, stride_ah, stride_am,
    num_heads, group_size, seqlen_q, seqlen_k, causal_offset,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, CONVERT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tensors of `flash_fwd_kernel`, and in device memory what one pass leaves to the next: Acc, float32 like Out
    (Out itself unless CONVERT), Sums and Maxima, float32 [batch, num_heads, seqlen_q]. This program computes one head.
    """
    batch_head = tl.program_id(0)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    head_kv = head // group_size
    first_row = batch_head.to(tl.int64) * seqlen_q
    acc_base = Acc + batch * stride_ab + head * stride_ah
    sums, maxima = Sums + first_row, Maxima + first_row
    first_values(acc_base, sums, maxima, stride_am, seqlen_q, HEAD_DIM_V, WIDTH_V, BLOCK_M)
    # what one thread wrote, another one may read in the next pass
    tl.debug_barrier()
    keys_seen = seqlen_k
    if CAUSAL:
        keys_seen = tl.maximum(0, tl.minimum(seqlen_k, seqlen_q + causal_offset))
    for tile in tl.range(0, tl.cdiv(keys_seen, BLOCK_N), num_stages=1):
        keys = Matrix(K + batch * stride_kb + head_kv * stride_kh, stride_kn, seqlen_k)
        k = load_matrix(keys, tile * BLOCK_N, BLOCK_N, HEAD_DIM, WIDTH, True)
        values = Matrix(V + batch * stride_vb + head_kv * stride_vh, stride_vn, seqlen_k)
        v = load_matrix(values, tile * BLOCK_N, BLOCK_N, HEAD_DIM_V, WIDTH_V, True)
        first_tile = 0
        if CAUSAL:  # no earlier query sees the first of these keys
            first_tile = tl.maximum(0, tile * BLOCK_N - causal_offset) // BLOCK_M
        for tile_m in tl.range(first_tile, tl.cdiv(seqlen_q, BLOCK_M), num_stages=1):
            row_start = tile_m * BLOCK_M
            queries = Matrix(Q + batch * stride_qb + head * stride_qh, stride_qm, seqlen_q)
            q = load_matrix(queries, row_start, BLOCK_M, HEAD_DIM, WIDTH, True)
            update_rows(
                q, k, v, acc_base, sums, maxima, row_start, tile, stride_am, seqlen_q, seqlen_k, causal_offset,
                scale_log2, HEAD_DIM_V, WIDTH_V, CAUSAL, CAUSAL or RAGGED, PRECISION, BLOCK_M,
            )  # fmt: skip
        tl.debug_barrier()
    lse_base = None if Lse is None else Lse + first_row
    last_values(
        acc_base, sums, maxima, Out + batch * stride_ob + head * stride_oh, lse_base, stride_am, stride_om, seqlen_q,
        HEAD_DIM_V, WIDTH_V, CONVERT, BLOCK_M,
    )  # fmt: skip
