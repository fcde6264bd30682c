"""Gradients of dense attention with every feature of a score: device functions.

With p = exp(score - lse) computed again from the saved log-sum-exp, and delta = rowsum(dout * out):

    dv = p^T dout        ds = p * (dout v^T - delta)        dq = scale * ds k        dk = scale * ds^T q

(FlashAttention, arXiv 2205.14135, algorithm 4). Under dropout p stands in dv, and dout v^T in ds, as dropout left them;
a soft cap multiplies ds by its derivative. Rows without keys have a log-sum-exp of -inf and no gradients.

A log-sum-exp is rounded to 2^-24 of itself, and a probability is wrong by as much times the score: by a factor of
thousands for scores of 1e8. None is ever above one. Where float32 should be as right as PyTorch's, the row's maximum
stands in place of the log-sum-exp, found from the very same products (`statistics_kernel`), and dout and delta come
divided by the row's sum: then the greatest exponent of a row is 0 to the bit.

A row that an additive mask hides with finite numbers alone (masked_rows.py) has keys of equal probability.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.backward.sparse_gradients import at_most_one, load_row_values
from blocktune.kernels.portable.forward.masked_rows import is_masked_row, log2_keys
from blocktune.kernels.portable.forward.scores import (
    full_row_range,
    full_tile_range,
    keep_tile,
    row_range,
    score_tile,
    tile_range,
)
from blocktune.kernels.portable.forward.softmax import no_maximum
from blocktune.kernels.portable.forward.tiles import load_matrix

# No module-level tl.constexpr: see kernels/portable/forward/tiles.py.


@triton.jit
def statistics_of(lse, dtype: tl.constexpr, BIASED: tl.constexpr):
    """What a score is compared with: the log-sum-exp [BLOCK_M], in base 2 unless BIASED; inf for a row without keys,
    which leaves it no probability. Of float32 the maxima of `statistics_kernel`, which are not scaled."""
    log2_e: tl.constexpr = 1.4426950408889634
    if dtype == tl.float32:
        return lse
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse if BIASED else lse * log2_e


@triton.jit
def probabilities(
    qk, statistics, rows, columns, mask_base, stride_mm, stride_mn, slope, scale, softcap, seqlen_q, seqlen_k, diagonal,
    window_left, window_right,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    CHECK_KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The probabilities of a tile of raw products, and the soft cap's derivative; positions as in `score_tile`.

    statistics: of `statistics_of`, broadcast like the rows. Scores that are products alone are not scaled before they
    are compared, and if EXACT not before the difference is taken.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    if SOFTCAP or ALIBI or MASK == 2:
        scores, derivative = score_tile(
            qk, rows, columns, scale, softcap, slope, mask_base, stride_mm, stride_mn, seqlen_q, seqlen_k, diagonal,
            window_left, window_right, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CHECK_KEYS,
        )  # fmt: skip
        if MASK == 2 and not EXACT:
            masked = is_masked_row(statistics)  # its keys are far above this reference, and so at the limit
            reference = tl.where(masked, -2251799813685248.0, statistics)
            p = at_most_one((scores - reference) * log2_e, tl.where(masked, -log2_keys(statistics), 0.0))
        else:
            p = at_most_one((scores - statistics) * log2_e)
        return p, derivative
    else:
        scores, derivative = score_tile(
            qk, rows, columns, 1.0, softcap, slope, mask_base, stride_mm, stride_mn, seqlen_q, seqlen_k,
            diagonal, window_left, window_right, CAUSAL, WINDOW, False, False, MASK, CHECK_KEYS,
        )  # fmt: skip
        if EXACT:
            exponents = (scores - statistics) * (scale * log2_e)
        else:
            exponents = scores * (scale * log2_e) - statistics
        return at_most_one(exponents), derivative


@triton.jit
def row_statistics(
    q, k_base, first, stop, row_start, stride_kn, mask_base, stride_mm, stride_mn, slope, scale, softcap, seqlen_q,
    seqlen_k, diagonal, window_left, window_right,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The maxima [BLOCK_M] that `probabilities` compares with, and the sums of what it then returns, over key tiles
    first..stop-1. The products are those of `walk_queries`, transposed too."""
    log2_e: tl.constexpr = 1.4426950408889634
    rows = (row_start + tl.arange(0, q.shape[0]))[None, :]
    highest = no_maximum(q.shape[0])
    total = tl.zeros([q.shape[0]], tl.float32)
    for tile in tl.range(first, stop, num_stages=1):
        columns = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        k = load_matrix(k_base, tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)
        # [BLOCK_N, BLOCK_M]
        qk = tl.dot(k, q.T, input_precision=PRECISION)
        if SOFTCAP or ALIBI or MASK == 2:
            scores, _ = score_tile(
                qk, rows, columns, scale, softcap, slope, mask_base, stride_mm, stride_mn, seqlen_q, seqlen_k, diagonal,
                window_left, window_right, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, True,
            )  # fmt: skip
            to_base_2 = log2_e
        else:
            scores, _ = score_tile(
                qk, rows, columns, 1.0, softcap, slope, mask_base, stride_mm, stride_mn, seqlen_q, seqlen_k, diagonal,
                window_left, window_right, CAUSAL, WINDOW, False, False, MASK, True,
            )  # fmt: skip
            to_base_2 = scale * log2_e
        new = tl.maximum(highest, tl.max(scores, 0))
        p = tl.exp2((scores - new[None, :]) * to_base_2)
        total = total * tl.exp2((highest - new) * to_base_2) + tl.sum(p, 0)
        highest = new
    return highest, total


@triton.jit
def add_to_sums(
    sums, dq, sums_head, first_row, rows, seqlen_q,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """sums += dq [BLOCK_M, WIDTH], float32, in rows first_row + `rows` [BLOCK_M] of head number sums_head.

    sums: a pointer to the head's row first_row, or for the copy engine (TMA) a descriptor of [heads, rows, HEAD_DIM],
    which leaves out what is outside the tensor; a row past the end of its sequence must be zero there.
    """
    if COPY_ENGINE:
        sums.atomic_add([sums_head, first_row + tl.min(rows, 0), 0], tl.reshape(dq, [1, dq.shape[0], WIDTH]))
    else:
        columns = tl.arange(0, WIDTH)
        pointers = sums + rows.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
        tl.atomic_add(pointers, dq, mask=(rows[:, None] < seqlen_q) & (columns[None, :] < HEAD_DIM), sem="relaxed")


@triton.jit
def walk_queries(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, sums, sums_head, sums_row, first, stop, key_start, stride_qm,
    stride_dom, mask_base, stride_mm, stride_mn, slope, scale, softcap, kept_share, batch_head, seed_lo, seed_hi,
    offset, threshold, seqlen_q, seqlen_k, diagonal, window_left, window_right,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    DROPOUT: tl.constexpr, CHECK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [BLOCK_N, WIDTH] / scale and dv [BLOCK_N, WIDTH_V] (times kept_share) with query tiles first..stop-1 added.

    Scores are transposed, [BLOCK_N, BLOCK_M], so that no product of dk and dv needs its left operand turned round.
    SUMS: 0, or dq / scale goes into the sums: 1 by atomic additions, 2 by the copy engine (`add_to_sums`). CHECK: tiles
    may reach beyond the last query or key.
    """
    columns = (key_start + tl.arange(0, k.shape[0]))[:, None]
    for tile in tl.range(first, stop, num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        # [BLOCK_M, WIDTH]
        q = load_matrix(q_base, tile * BLOCK_M, stride_qm, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, CHECK)
        lse = load_row_values(lse_base, rows, seqlen_q, float("inf"), CHECK)
        statistics = statistics_of(lse, q.dtype, SOFTCAP or ALIBI or MASK == 2)
        # [BLOCK_N, BLOCK_M]
        p, derivative = probabilities(
            tl.dot(k, q.T, input_precision=PRECISION), statistics[None, :], rows[None, :], columns, mask_base,
            stride_mm, stride_mn, slope, scale, softcap, seqlen_q, seqlen_k, diagonal, window_left, window_right,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, CHECK, q.dtype == tl.float32,
        )  # fmt: skip
        if CHECK:  # an infinite key times the zeros of a row past the end is NaN
            p = tl.where(rows[None, :] < seqlen_q, p, 0.0)
        # [BLOCK_M, WIDTH_V]
        dout = load_matrix(dout_base, tile * BLOCK_M, stride_dom, seqlen_q, BLOCK_M, HEAD_DIM_V, WIDTH_V, CHECK)
        kept = p
        if DROPOUT:
            keep = keep_tile(
                rows[None, :], key_start, batch_head, seed_lo, seed_hi, offset, threshold, k.shape[0], True
            )  # fmt: skip
            kept = tl.where(keep, p, 0.0)
        dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = load_row_values(delta_base, rows, seqlen_q, 0.0, CHECK)
        dp = tl.dot(v, dout.T, input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(keep, dp * (1.0 / kept_share), 0.0)
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds *= derivative
        # past the end the derivative may be NaN, and the copy engine finds rows of another sequence
        if (SOFTCAP and CHECK) or (PACKED and SUMS == 2):
            ds = tl.where(rows[None, :] < seqlen_q, ds, 0.0)
        narrow = ds.to(q.dtype)
        dk = tl.dot(narrow, q, dk, input_precision=PRECISION)
        if SUMS != 0:
            # [BLOCK_M, WIDTH]
            dq = tl.dot(narrow.T, k, input_precision=PRECISION)
            add_to_sums(sums, dq, sums_head, sums_row, rows, seqlen_q, HEAD_DIM, WIDTH, SUMS == 2)
    return dk, dv


@triton.jit
def gradients_of_keys(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, sums, sums_head, sums_row, key_start, stride_qm, stride_dom,
    mask_base, stride_mm, stride_mn, slope, scale, softcap, kept_share, batch_head, seed_lo, seed_hi, offset, threshold,
    seqlen_q, seqlen_k, diagonal, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of `walk_queries` with all queries of one head that see some key of the block.

    Tiles at the diagonal, tiles without any mask, tiles that the window cuts and tiles at the end. A mask tensor has
    something to say in all of them.
    """
    first, stop = row_range(
        key_start, BLOCK_N, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_M, CAUSAL, WINDOW
    )
    full, full_stop = first, first
    if MASK == 0:
        full, full_stop = full_row_range(
            key_start, BLOCK_N, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_M, CAUSAL, WINDOW
        )
    if (CAUSAL or WINDOW) and MASK == 0:
        dk, dv = walk_queries(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, sums, sums_head, sums_row, first, full, key_start,
            stride_qm, stride_dom, mask_base, stride_mm, stride_mn, slope, scale, softcap, kept_share, batch_head,
            seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_M,
            HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, DROPOUT, RAGGED, PACKED, SUMS,
            STAGES, PRECISION,
        )  # fmt: skip
    if MASK == 0:
        dk, dv = walk_queries(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, sums, sums_head, sums_row, full, full_stop,
            key_start, stride_qm, stride_dom, mask_base, stride_mm, stride_mn, slope, scale, softcap, kept_share,
            batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k, diagonal, window_left, window_right,
            BLOCK_M, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, False, False, SOFTCAP, ALIBI, MASK, DROPOUT, False, PACKED,
            SUMS, STAGES, PRECISION,
        )  # fmt: skip
    if WINDOW or RAGGED or MASK != 0:
        dk, dv = walk_queries(
            dk, dv, k, v, q_base, dout_base, lse_base, delta_base, sums, sums_head, sums_row, full_stop, stop,
            key_start, stride_qm, stride_dom, mask_base, stride_mm, stride_mn, slope, scale, softcap, kept_share,
            batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k, diagonal, window_left, window_right,
            BLOCK_M, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, DROPOUT, RAGGED,
            PACKED, SUMS, STAGES, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit
def walk_keys(
    dq, q, dout, statistics, delta, k_base, v_base, first, stop, row_start, stride_kn, stride_vn, mask_base, stride_mm,
    stride_mn, slope, scale, softcap, kept_share, batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k,
    diagonal, window_left, window_right,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    DROPOUT: tl.constexpr, CHECK_KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M, WIDTH] / scale with key tiles first..stop-1 added."""
    rows = (row_start + tl.arange(0, q.shape[0]))[:, None]
    for tile in tl.range(first, stop, num_stages=STAGES):
        columns = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        # [BLOCK_N, WIDTH], [BLOCK_N, WIDTH_V]
        k = load_matrix(k_base, tile * BLOCK_N, stride_kn, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, CHECK_KEYS)
        v = load_matrix(v_base, tile * BLOCK_N, stride_vn, seqlen_k, BLOCK_N, HEAD_DIM_V, WIDTH_V, CHECK_KEYS)
        # [BLOCK_M, BLOCK_N]
        p, derivative = probabilities(
            tl.dot(q, k.T, input_precision=PRECISION), statistics[:, None], rows, columns, mask_base, stride_mm,
            stride_mn, slope, scale, softcap, seqlen_q, seqlen_k, diagonal, window_left, window_right, CAUSAL, WINDOW,
            SOFTCAP, ALIBI, MASK, CHECK_KEYS, q.dtype == tl.float32,
        )  # fmt: skip
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        if DROPOUT:
            keep = keep_tile(
                rows, tile * BLOCK_N, batch_head, seed_lo, seed_hi, offset, threshold, BLOCK_N, False
            )  # fmt: skip
            dp = tl.where(keep, dp * (1.0 / kept_share), 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds *= derivative
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def gradients_of_queries(
    q, dout, statistics, delta, k_base, v_base, row_start, stride_kn, stride_vn, mask_base, stride_mm, stride_mn, slope,
    scale, softcap, kept_share, batch_head, seed_lo, seed_hi, offset, threshold, seqlen_q, seqlen_k, diagonal,
    window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, RAGGED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M, WIDTH] / scale of a block of queries, in the loops of `attend_general`."""
    first, stop = tile_range(
        row_start, BLOCK_M, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, CAUSAL, WINDOW
    )
    full, full_stop = first, first
    if MASK == 0:
        full, full_stop = full_tile_range(
            row_start, BLOCK_M, seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, CAUSAL, WINDOW
        )
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if WINDOW and MASK == 0:
        dq = walk_keys(
            dq, q, dout, statistics, delta, k_base, v_base, first, full, row_start, stride_kn, stride_vn, mask_base,
            stride_mm, stride_mn, slope, scale, softcap, kept_share, batch_head, seed_lo, seed_hi, offset, threshold,
            seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, DROPOUT, RAGGED, STAGES, PRECISION,
        )  # fmt: skip
    if MASK == 0:
        dq = walk_keys(
            dq, q, dout, statistics, delta, k_base, v_base, full, full_stop, row_start, stride_kn, stride_vn, mask_base,
            stride_mm, stride_mn, slope, scale, softcap, kept_share, batch_head, seed_lo, seed_hi, offset, threshold,
            seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V,
            False, False, SOFTCAP, ALIBI, MASK, DROPOUT, False, STAGES, PRECISION,
        )  # fmt: skip
    if CAUSAL or WINDOW or RAGGED or MASK != 0:
        dq = walk_keys(
            dq, q, dout, statistics, delta, k_base, v_base, full_stop, stop, row_start, stride_kn, stride_vn, mask_base,
            stride_mm, stride_mn, slope, scale, softcap, kept_share, batch_head, seed_lo, seed_hi, offset, threshold,
            seqlen_q, seqlen_k, diagonal, window_left, window_right, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, MASK, DROPOUT, RAGGED, STAGES, PRECISION,
        )  # fmt: skip
    return dq
