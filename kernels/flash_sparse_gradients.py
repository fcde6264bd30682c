"""Gradients of block-sparse attention: device functions of one tile row or column each.

With p = exp2(score - lse) recomputed from the saved log-sum-exp, and delta = rowsum(dout * out):

    dv = p^T dout        ds = p * (dout v^T - delta)        dq = scale * ds k        dk = scale * ds^T q

(FlashAttention, arXiv 2205.14135, algorithm 4, cut into one pass for dq and one for dk and dv as FlashAttention-2 does,
so that nothing is added up between programs and every run gives the same bits).
"""

import triton
import triton.language as tl

from blocktune.kernels.flash_sparse_tiles import listed_tile
from blocktune.kernels.flash_tiles import load_matrix


@triton.jit
def load_row_values(base, rows, seqlen_q, other, CHECK_ROWS: tl.constexpr):
    """One float32 of every row [BLOCK_M], `other` past the end."""
    if CHECK_ROWS:
        return tl.load(base + rows, mask=rows < seqlen_q, other=other)
    else:
        return tl.load(base + rows)


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
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale_log2 - lse_2[:, None])
        if MASKED:  # selects, and does not multiply: a row without keys has a log-sum-exp of -inf
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
    log2_e: tl.constexpr = 1.4426950408889634
    tile = listed_tile(indices, first, shift)
    for step in tl.range(first, stop, num_stages=STAGES):
        following = listed_tile(indices, tl.minimum(step + 1, stop), shift)
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_matrix(Q, tile * BLOCK_M, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, RAGGED_Q)
        lse_2 = load_row_values(Lse, rows, seqlen_q, float("inf"), RAGGED_Q) * log2_e
        # [BLOCK_N, BLOCK_M]
        p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * scale_log2 - lse_2[None, :])
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
