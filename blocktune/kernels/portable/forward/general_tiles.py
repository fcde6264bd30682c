"""The key tiles of the general forward: device functions that know every feature of a score."""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.scores import full_tile_range, keep_tile, score_tile, tile_range
from blocktune.kernels.portable.forward.softmax import exact_step, no_maximum
from blocktune.kernels.portable.forward.tiles import load_matrix

# No module-level tl.constexpr: see kernels/portable/forward/tiles.py.


@triton.jit
def attend_tiles(
    q, k_base, v_base, acc, l_i, m_i, first, stop, row_start, stride_kn, stride_vn, mask_base, stride_mm, stride_mn,
    slope, scale, softcap, batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k, diagonal, window_left,
    window_right,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    DROPOUT: tl.constexpr, CHECK_KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles first..stop-1: scores, softmax, dropout, product with V. Returns acc, l_i, m_i.

    m_i is in natural units if a score is more than a product (SOFTCAP, ALIBI or an additive MASK), else unscaled. An
    additive mask may hide keys with -1e30, whose product with log2(e) is rounded by more than any exponent holds, and
    so are scores of 1e9: `exact_step` takes the difference first.
    acc is not yet divided by the sums, nor by the share of the pairs that dropout keeps.
    """
    biased: tl.constexpr = SOFTCAP or ALIBI or MASK == 2
    log2_e: tl.constexpr = 1.4426950408889634
    rows = (row_start + tl.arange(0, acc.shape[0]))[:, None]
    for tile in tl.range(first, stop, num_stages=STAGES):
        columns = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        # [BLOCK_N, WIDTH]
        k = load_matrix(k_base, tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, CHECK_KEYS)
        # [BLOCK_M, BLOCK_N]
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        if biased:
            scores, _ = score_tile(
                qk, rows, columns, scale, softcap, slope, mask_base, stride_mm, stride_mn, seqlen_q, seqlen_k,
                diagonal, window_left, window_right, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CHECK_KEYS,
            )  # fmt: skip
            p, m_i, l_i, factor = exact_step(scores, m_i, l_i, log2_e)
        else:
            scores, _ = score_tile(
                qk, rows, columns, 1.0, softcap, slope, mask_base, stride_mm, stride_mn, seqlen_q, seqlen_k,
                diagonal, window_left, window_right, CAUSAL, WINDOW, False, False, MASK, CHECK_KEYS,
            )  # fmt: skip
            p, m_i, l_i, factor = exact_step(scores, m_i, l_i, scale * log2_e)
        if DROPOUT:
            keep = keep_tile(
                rows, tile * BLOCK_N, batch_head, seed_lo, seed_hi, offset, threshold, BLOCK_N, False
            )  # fmt: skip
            p = tl.where(keep, p, 0.0)
        # [BLOCK_N, WIDTH_V]
        v = load_matrix(v_base, tile * BLOCK_N, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, CHECK_KEYS)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=PRECISION)
    return acc, l_i, m_i


@triton.jit
def attend_general(
    q, k_base, v_base, row_start, stride_kn, stride_vn, mask_base, stride_mm, stride_mn, slope, scale, softcap,
    batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, RAGGED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All visible key tiles for q [BLOCK_M, WIDTH]: acc [BLOCK_M, WIDTH_V], l_i and m_i [BLOCK_M] of `attend_tiles`.

    Tiles that the window cuts at the left, tiles without any mask, tiles at the diagonal and at the end. A mask tensor
    has something to say in all of them, and only two kinds are told apart: whole tiles and the one at the end.
    """
    first, stop = tile_range(
        row_start, BLOCK_M, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, CAUSAL, WINDOW
    )
    full, full_stop = first, first
    if MASK == 0:
        full, full_stop = full_tile_range(
            row_start, BLOCK_M, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, CAUSAL, WINDOW
        )
    acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = no_maximum(BLOCK_M)
    if WINDOW and MASK == 0:
        acc, l_i, m_i = attend_tiles(
            q, k_base, v_base, acc, l_i, m_i, first, full, row_start, stride_kn, stride_vn, mask_base, stride_mm,
            stride_mn, slope, scale, softcap, batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k,
            diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, WINDOW, SOFTCAP,
            ALIBI, MASK, DROPOUT, RAGGED, STAGES, PRECISION,
        )  # fmt: skip
    if MASK == 0:
        acc, l_i, m_i = attend_tiles(
            q, k_base, v_base, acc, l_i, m_i, full, full_stop, row_start, stride_kn, stride_vn, mask_base, stride_mm,
            stride_mn, slope, scale, softcap, batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k,
            diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, False, SOFTCAP,
            ALIBI, MASK, DROPOUT, False, STAGES, PRECISION,
        )  # fmt: skip
    if MASK != 0:
        full_stop = tl.minimum(stop, tl.maximum(first, seqlen_k // BLOCK_N))
        acc, l_i, m_i = attend_tiles(
            q, k_base, v_base, acc, l_i, m_i, first, full_stop, row_start, stride_kn, stride_vn, mask_base, stride_mm,
            stride_mn, slope, scale, softcap, batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k,
            diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, WINDOW, SOFTCAP,
            ALIBI, MASK, DROPOUT, False, STAGES, PRECISION,
        )  # fmt: skip
    if RAGGED or ((CAUSAL or WINDOW) and MASK == 0):
        acc, l_i, m_i = attend_tiles(
            q, k_base, v_base, acc, l_i, m_i, full_stop, stop, row_start, stride_kn, stride_vn, mask_base, stride_mm,
            stride_mn, slope, scale, softcap, batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k,
            diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, WINDOW, SOFTCAP,
            ALIBI, MASK, DROPOUT, RAGGED, STAGES, PRECISION,
        )  # fmt: skip
    log2_e: tl.constexpr = 1.4426950408889634
    if SOFTCAP or ALIBI or MASK == 2:
        m_i = m_i * log2_e  # as `store_rows` takes it
    else:
        m_i = m_i * (scale * log2_e)
    return acc, l_i, m_i
