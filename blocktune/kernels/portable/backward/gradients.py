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

from blocktune.kernels.portable.backward.sparse_gradients import limit_exp2, load_row_values
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
    """Return what a score is compared with: the log-sum-exp [BLOCK_M], in base 2 unless BIASED; inf for a row without
    keys, which leaves it no probability. Of float32 the maxima of `statistics_kernel`, which are not scaled."""
    log2_e: tl.constexpr = 1.4426950408889634
    if dtype == tl.float32:
        return lse
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse if BIASED else lse * log2_e


@triton.jit
def probabilities(
    qk, statistics, rows, columns, scoring, sequence,
    BOUNDED: tl.constexpr, CHECK_KEYS: tl.constexpr, EXACT: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Return the probabilities of a tile of raw products, and the soft cap's derivative; positions as in `score_tile`.

    statistics: of `statistics_of`, broadcast like the rows. Scores that are products alone are not scaled before they
    are compared, and if EXACT not before the difference is taken.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    scale = scoring.scale if OPTIONS.BIASED else 1.0
    scores, derivative = score_tile(qk, rows, columns, scale, scoring, sequence, BOUNDED, CHECK_KEYS, OPTIONS)
    if OPTIONS.MASK == 2 and not EXACT:
        masked = is_masked_row(statistics)  # its keys are far above this reference, and so at the limit
        reference = tl.where(masked, -2251799813685248.0, statistics)
        p = limit_exp2((scores - reference) * log2_e, tl.where(masked, -log2_keys(statistics), 0.0))
    elif OPTIONS.BIASED:
        p = limit_exp2((scores - statistics) * log2_e)
    elif EXACT:
        p = limit_exp2((scores - statistics) * (scoring.scale * log2_e))
    else:
        p = limit_exp2(scores * (scoring.scale * log2_e) - statistics)
    return p, derivative


@triton.jit
def row_statistics(q, keys, first, stop, row_start, sequence, scoring, OPTIONS: tl.constexpr):
    """Return the maxima [BLOCK_M] that `probabilities` compares with, and the sums of what it then returns, over tiles
    first..stop-1 of the `Matrix` of keys. The products are those of `walk_queries`, transposed too."""
    log2_e: tl.constexpr = 1.4426950408889634
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    rows = (row_start + tl.arange(0, q.shape[0]))[None, :]
    highest = no_maximum(q.shape[0])
    total = tl.zeros([q.shape[0]], tl.float32)
    for tile in tl.range(first, stop, num_stages=1):
        columns = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        k = load_matrix(keys, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, True)
        # [BLOCK_N, BLOCK_M]
        qk = tl.dot(k, q.T, input_precision=OPTIONS.PRECISION)
        scale = scoring.scale if OPTIONS.BIASED else 1.0
        scores, _ = score_tile(qk, rows, columns, scale, scoring, sequence, True, True, OPTIONS)
        to_base_2 = log2_e if OPTIONS.BIASED else scoring.scale * log2_e
        new = tl.maximum(highest, tl.max(scores, 0))
        p = tl.exp2((scores - new[None, :]) * to_base_2)
        total = total * tl.exp2((highest - new) * to_base_2) + tl.sum(p, 0)
        highest = new
    return highest, total


@triton.jit
def add_to_sums(sums, dq, rows, seqlen_q, OPTIONS: tl.constexpr):
    """Add dq [BLOCK_M, WIDTH], float32, to the `QuerySums` of rows `rows` [BLOCK_M]. For the copy engine a row past the
    end of its sequence must be zero."""
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    if OPTIONS.SUMS == 2:
        sums.sums.atomic_add([sums.head, sums.row + tl.min(rows, 0), 0], tl.reshape(dq, [1, dq.shape[0], WIDTH]))
    else:
        columns = tl.arange(0, WIDTH)
        pointers = sums.sums + rows.to(tl.int64)[:, None] * OPTIONS.HEAD_DIM + columns[None, :]
        inside = (rows[:, None] < seqlen_q) & (columns[None, :] < OPTIONS.HEAD_DIM)
        tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")


@triton.jit
def walk_queries(
    dk, dv, k, v, queries, sums, first, stop, key_start, sequence, scoring, dropout,
    BOUNDED: tl.constexpr, CHECK: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Return dk [BLOCK_N, WIDTH] / scale and dv [BLOCK_N, WIDTH_V] (times kept_share) with query tiles first..stop-1
    added.

    Scores are transposed, [BLOCK_N, BLOCK_M], so that no product of dk and dv needs its left operand turned round. With
    SUMS, dq / scale goes into the sums (`add_to_sums`). CHECK: tiles may reach beyond the last query or key.
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    seqlen_q = sequence.seqlen_q
    columns = (key_start + tl.arange(0, k.shape[0]))[:, None]
    for tile in tl.range(first, stop, num_stages=OPTIONS.STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        # [BLOCK_M, WIDTH]
        q = load_matrix(queries.q, tile * BLOCK_M, BLOCK_M, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, CHECK)
        lse = load_row_values(queries.lse, rows, seqlen_q, float("inf"), CHECK)
        statistics = statistics_of(lse, q.dtype, OPTIONS.BIASED)
        # [BLOCK_N, BLOCK_M]
        qk = tl.dot(k, q.T, input_precision=PRECISION)
        p, derivative = probabilities(
            qk, statistics[None, :], rows[None, :], columns, scoring, sequence, BOUNDED, CHECK, q.dtype == tl.float32,
            OPTIONS,
        )  # fmt: skip
        if CHECK:  # an infinite key times the zeros of a row past the end is NaN
            p = tl.where(rows[None, :] < seqlen_q, p, 0.0)
        # [BLOCK_M, WIDTH_V]
        dout = load_matrix(queries.dout, tile * BLOCK_M, BLOCK_M, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, CHECK)
        kept = p
        if OPTIONS.DROPOUT:
            keep = keep_tile(rows[None, :], key_start, dropout, k.shape[0], True)
            kept = tl.where(keep, p, 0.0)
        dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = load_row_values(queries.delta, rows, seqlen_q, 0.0, CHECK)
        dp = tl.dot(v, dout.T, input_precision=PRECISION)
        if OPTIONS.DROPOUT:
            dp = tl.where(keep, dp * (1.0 / dropout.kept_share), 0.0)
        ds = p * (dp - delta[None, :])
        if OPTIONS.SOFTCAP:  # of a hidden key, or past the end, the derivative or the row's delta may be NaN
            ds = tl.where(p == 0.0, 0.0, ds * derivative)
        if OPTIONS.PACKED and OPTIONS.SUMS == 2:  # the copy engine finds rows of another sequence
            ds = tl.where(rows[None, :] < seqlen_q, ds, 0.0)
        narrow = ds.to(q.dtype)
        dk = tl.dot(narrow, q, dk, input_precision=PRECISION)
        if OPTIONS.SUMS != 0:
            # [BLOCK_M, WIDTH]
            dq = tl.dot(narrow.T, k, input_precision=PRECISION)
            add_to_sums(sums, dq, rows, seqlen_q, OPTIONS)
    return dk, dv


@triton.jit
def gradients_of_keys(dk, dv, k, v, queries, sums, key_start, sequence, scoring, dropout, OPTIONS: tl.constexpr):
    """Return dk and dv of `walk_queries` with all queries of one head that see some key of the block.

    Tiles at the diagonal, tiles without any mask, tiles that the window cuts and tiles at the end. A mask tensor has
    something to say in all of them.
    """
    RAGGED: tl.constexpr = OPTIONS.RAGGED
    first, stop = row_range(key_start, sequence, OPTIONS)
    full, full_stop = first, first
    if OPTIONS.MASK == 0:
        full, full_stop = full_row_range(key_start, sequence, OPTIONS)
    if (OPTIONS.CAUSAL or OPTIONS.WINDOW) and OPTIONS.MASK == 0:
        dk, dv = walk_queries(
            dk, dv, k, v, queries, sums, first, full, key_start, sequence, scoring, dropout, True, RAGGED, OPTIONS
        )
    if OPTIONS.MASK == 0:
        dk, dv = walk_queries(
            dk, dv, k, v, queries, sums, full, full_stop, key_start, sequence, scoring, dropout, False, False, OPTIONS
        )
    if OPTIONS.WINDOW or RAGGED or OPTIONS.MASK != 0:
        dk, dv = walk_queries(
            dk, dv, k, v, queries, sums, full_stop, stop, key_start, sequence, scoring, dropout, True, RAGGED, OPTIONS
        )
    return dk, dv


@triton.jit
def walk_keys(
    dq, owned, keys, first, stop, row_start, sequence, scoring, dropout,
    BOUNDED: tl.constexpr, CHECK_KEYS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Return dq [BLOCK_M, WIDTH] / scale of a `QueryTile` with key tiles first..stop-1 added."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    q, dout, statistics, delta = owned
    rows = (row_start + tl.arange(0, q.shape[0]))[:, None]
    for tile in tl.range(first, stop, num_stages=OPTIONS.STAGES):
        columns = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        # [BLOCK_N, WIDTH], [BLOCK_N, WIDTH_V]
        k = load_matrix(keys.k, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, CHECK_KEYS)
        v = load_matrix(keys.v, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, CHECK_KEYS)
        # [BLOCK_M, BLOCK_N]
        qk = tl.dot(q, k.T, input_precision=PRECISION)
        p, derivative = probabilities(
            qk, statistics[:, None], rows, columns, scoring, sequence, BOUNDED, CHECK_KEYS, q.dtype == tl.float32,
            OPTIONS,
        )  # fmt: skip
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        if OPTIONS.DROPOUT:
            keep = keep_tile(rows, tile * BLOCK_N, dropout, BLOCK_N, False)
            dp = tl.where(keep, dp * (1.0 / dropout.kept_share), 0.0)
        ds = p * (dp - delta[:, None])
        if OPTIONS.SOFTCAP:  # as in `walk_queries`
            ds = tl.where(p == 0.0, 0.0, ds * derivative)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def gradients_of_queries(owned, keys, row_start, sequence, scoring, dropout, OPTIONS: tl.constexpr):
    """Return dq [BLOCK_M, WIDTH] / scale of a `QueryTile`, in the loops of `attend_general`."""
    RAGGED: tl.constexpr = OPTIONS.RAGGED
    first, stop = tile_range(row_start, sequence, OPTIONS)
    full, full_stop = first, first
    if OPTIONS.MASK == 0:
        full, full_stop = full_tile_range(row_start, sequence, OPTIONS)
    dq = tl.zeros(owned.q.shape, tl.float32)
    if OPTIONS.WINDOW and OPTIONS.MASK == 0:
        dq = walk_keys(dq, owned, keys, first, full, row_start, sequence, scoring, dropout, True, RAGGED, OPTIONS)
    if OPTIONS.MASK == 0:
        dq = walk_keys(dq, owned, keys, full, full_stop, row_start, sequence, scoring, dropout, False, False, OPTIONS)
    if OPTIONS.CAUSAL or OPTIONS.WINDOW or RAGGED or OPTIONS.MASK != 0:
        dq = walk_keys(dq, owned, keys, full_stop, stop, row_start, sequence, scoring, dropout, True, RAGGED, OPTIONS)
    return dq
