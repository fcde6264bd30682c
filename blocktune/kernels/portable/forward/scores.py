"""Scores of one tile with every feature, and which tiles see each other: device functions of the general kernels.

Positions broadcast: `rows` are queries and `columns` keys, int32, as [M, 1] and [1, N] for a tile [M, N] of a kernel
whose programs own queries, or as [1, M] and [N, 1] for the transposed tile [N, M] of one whose programs own keys. All
that is done to a score is elementwise, so that the same functions serve both.

The diagonal of `SequenceBounds` is the key that query 0 stands at (`AttentionShape.diagonal`, or that of the sequence
at hand). CAUSAL is a right side of 0, whatever `right` says.
"""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.masked_rows import bounded_mask

# No module-level tl.constexpr: see kernels/portable/forward/tiles.py.


@triton.jit
def visible_tile(rows, columns, sequence, BOUNDED: tl.constexpr, CHECK_KEYS: tl.constexpr, OPTIONS: tl.constexpr):
    """Return whether causal mask and window (BOUNDED) and the end of the keys (CHECK_KEYS) let the queries see the
    keys."""
    seen = tl.full([1, 1], True, tl.int1)
    if CHECK_KEYS:
        seen = seen & (columns < sequence.seqlen_k)
    if BOUNDED and OPTIONS.CAUSAL:
        seen = seen & (columns <= rows + sequence.diagonal)
    if BOUNDED and OPTIONS.WINDOW:
        seen = seen & ((sequence.left < 0) | (columns >= rows + sequence.diagonal - sequence.left))
        if not OPTIONS.CAUSAL:
            seen = seen & ((sequence.right < 0) | (columns <= rows + sequence.diagonal + sequence.right))
    return seen


@triton.jit
def hyperbolic_tangent(values, factor):
    """Return tanh of x = values * factor: 1 - 2 / (1 + exp(2 x)). An exponential that overflows gives 1, one that
    vanishes -1.

    That difference is wrong by 2^-24 of one, whatever x is: more than a score under a huge cap bears. Where |x| < 1/4,
    the first five terms of the series of tanh leave out 1e-8 of x.
    """
    doubled_log2: tl.constexpr = 2.8853900817779268
    bent = 1.0 - 2.0 / (1.0 + tl.exp2(values * (factor * doubled_log2)))
    x = values * factor
    square = x * x
    rest = square * (-0.05396825396825397 + square * 0.021869488536155203)
    series = x + x * (square * (-0.3333333333333333 + square * (0.13333333333333333 + rest)))
    return tl.where(tl.abs(x) < 0.25, series, bent)


@triton.jit
def score_tile(
    qk, rows, columns, scale, scoring, sequence,
    BOUNDED: tl.constexpr, CHECK_KEYS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Return the final scores of a tile of raw products `qk`, and d(score before any bias) / d(scale * qk).

    The order is scale, softcap * tanh(score / softcap), minus slope * |distance to the diagonal|, plus the additive
    mask (`bounded_mask`), then -inf where the pair takes no part. CHECK_KEYS: the tile may reach beyond the last key;
    with a mask tensor every tile may reach beyond the last query too, and is not read there. BOUNDED: as of
    `visible_tile`. The derivative is [1, 1] without SOFTCAP, and 0 where the pair takes no part.
    """
    scores = qk * scale
    derivative = tl.full([1, 1], 1.0, tl.float32)
    if OPTIONS.SOFTCAP:
        bent = hyperbolic_tangent(scores, 1.0 / scoring.softcap)
        scores = bent * scoring.softcap
        derivative = 1.0 - bent * bent
    if OPTIONS.ALIBI:
        scores -= scoring.slope * tl.abs(rows + sequence.diagonal - columns).to(tl.float32)
    if OPTIONS.MASK != 0:
        pointers = scoring.mask + rows.to(tl.int64) * scoring.mask_row + columns.to(tl.int64) * scoring.mask_column
        inside = rows < sequence.seqlen_q  # the same for neighbouring keys, which are then loaded together
        if CHECK_KEYS:
            inside = inside & (columns < sequence.seqlen_k)
        if OPTIONS.MASK == 1:
            scores = tl.where(tl.load(pointers, mask=inside, other=0) != 0, scores, float("-inf"))
        else:
            scores += bounded_mask(tl.load(pointers, mask=inside, other=0.0).to(tl.float32))
    if CHECK_KEYS or (BOUNDED and (OPTIONS.CAUSAL or OPTIONS.WINDOW)):
        # last: what a mask holds where nobody looks, NaN included, changes nothing
        seen = visible_tile(rows, columns, sequence, BOUNDED, CHECK_KEYS, OPTIONS)
        scores = tl.where(seen, scores, float("-inf"))
    if OPTIONS.SOFTCAP:  # the product with a hidden key may be NaN, which no probability of zero would undo
        derivative = tl.where(scores == float("-inf"), 0.0, derivative)
    return scores, derivative


@triton.jit
def keep_tile(rows, first_key, dropout, KEYS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return where dropout keeps the pair, [M, KEYS], or [KEYS, M] if TRANSPOSED: its number of 16 bits is at least
    `threshold`. Sixteen neighbouring keys have the words of Philox4x32-7 (Salmon et al., SC 2011) of the counter (key
    // 16, query, batch * num_heads + head, offset) under the key (seed_lo, seed_hi): the upper byte is byte key % 16 //
    8 * 2 + key % 2 of word key % 8 // 2, the lower one the uppermost of all words by exclusive or.

    rows: the queries, broadcast as everywhere here. first_key: a multiple of 16.
    """
    sixteens = first_key // 16 + tl.arange(0, KEYS // 16)
    sixteens = sixteens[:, None] if TRANSPOSED else sixteens[None, :]
    w0, w1, w2, w3 = tl.philox_impl(
        sixteens.to(tl.uint32, bitcast=True),
        rows.to(tl.uint32, bitcast=True),
        dropout.batch_head.to(tl.int32).to(tl.uint32, bitcast=True),
        dropout.offset.to(tl.uint32, bitcast=True),
        dropout.seed_lo.to(tl.uint32, bitcast=True),
        dropout.seed_hi.to(tl.uint32, bitcast=True),
        n_rounds=7,
    )
    # a joined dimension is the last one: [.., 2, 2] counts the words 0, 1, 2, 3, and [.., 2, 2] after it their bytes
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    shared = (w0 ^ w1 ^ w2 ^ w3) >> 24
    shared = tl.join(tl.join(shared, shared), tl.join(shared, shared))
    least = dropout.threshold.to(tl.uint32, bitcast=True)
    k0 = (words << 8 & 0xFF00 | shared) >= least
    k1 = (words & 0xFF00 | shared) >= least
    k2 = (words >> 8 & 0xFF00 | shared) >= least
    k3 = (words >> 16 & 0xFF00 | shared) >= least
    keep = tl.join(tl.join(k0, k2), tl.join(k1, k3))
    # keys are sixteens, eights, words, two of a word
    if TRANSPOSED:
        keep = tl.reshape(tl.permute(keep, (0, 4, 2, 3, 5, 1)), [KEYS, keep.shape[1]])
    else:
        keep = tl.reshape(tl.permute(keep, (0, 1, 4, 2, 3, 5)), [keep.shape[0], KEYS])
    return keep


@triton.jit
def tile_range(row_start, sequence, OPTIONS: tl.constexpr):
    """Return (first, stop): the key tiles of which some query row_start..row_start+BLOCK_M-1 may see a key; stop >=
    first."""
    diagonal, left, right = sequence.diagonal, sequence.left, sequence.right
    low, high = 0, sequence.seqlen_k
    if OPTIONS.CAUSAL or OPTIONS.WINDOW:
        last_row = tl.minimum(row_start + OPTIONS.BLOCK_M, sequence.seqlen_q) - 1
        if OPTIONS.CAUSAL:
            high = tl.minimum(high, last_row + diagonal + 1)
        elif OPTIONS.WINDOW:
            high = tl.where(right < 0, high, tl.minimum(high, last_row + diagonal + right + 1))
        if OPTIONS.WINDOW:
            low = tl.where(left < 0, low, tl.maximum(low, row_start + diagonal - left))
    first = low // OPTIONS.BLOCK_N
    return first, tl.maximum(first, tl.cdiv(tl.maximum(high, 0), OPTIONS.BLOCK_N))


@triton.jit
def full_tile_range(row_start, sequence, OPTIONS: tl.constexpr):
    """Return (full, stop): the key tiles of which every query of the block sees every key, inside those of
    `tile_range`."""
    diagonal, left, right = sequence.diagonal, sequence.left, sequence.right
    first, end = tile_range(row_start, sequence, OPTIONS)
    low, high = first * OPTIONS.BLOCK_N, sequence.seqlen_k
    if OPTIONS.CAUSAL:
        high = tl.minimum(high, row_start + diagonal + 1)
    elif OPTIONS.WINDOW:
        high = tl.where(right < 0, high, tl.minimum(high, row_start + diagonal + right + 1))
    if OPTIONS.WINDOW:
        last_row = tl.minimum(row_start + OPTIONS.BLOCK_M, sequence.seqlen_q) - 1
        low = tl.where(left < 0, low, tl.maximum(low, last_row + diagonal - left))
    full = tl.minimum(tl.cdiv(low, OPTIONS.BLOCK_N), end)
    return full, tl.maximum(full, tl.maximum(high, 0) // OPTIONS.BLOCK_N)


@triton.jit
def row_range(column_start, sequence, OPTIONS: tl.constexpr):
    """Return (first, stop): the query tiles of which some query may see a key
    column_start..column_start+BLOCK_N-1."""
    diagonal, left, right = sequence.diagonal, sequence.left, sequence.right
    low, high = 0, sequence.seqlen_q
    if OPTIONS.CAUSAL or OPTIONS.WINDOW:
        last_column = tl.minimum(column_start + OPTIONS.BLOCK_N, sequence.seqlen_k) - 1
        if OPTIONS.CAUSAL:
            low = tl.maximum(low, column_start - diagonal)
        elif OPTIONS.WINDOW:
            low = tl.where(right < 0, low, tl.maximum(low, column_start - diagonal - right))
        if OPTIONS.WINDOW:
            high = tl.where(left < 0, high, tl.minimum(high, last_column - diagonal + left + 1))
    first = low // OPTIONS.BLOCK_M
    return first, tl.maximum(first, tl.cdiv(tl.maximum(high, 0), OPTIONS.BLOCK_M))


@triton.jit
def full_row_range(column_start, sequence, OPTIONS: tl.constexpr):
    """Return (full, stop): the query tiles of which every query sees every key of the block, inside those of
    `row_range`.

    A tile that reaches beyond the last query is not among them, nor is any when the block reaches beyond the last key.
    """
    diagonal, left, right = sequence.diagonal, sequence.left, sequence.right
    first, end = row_range(column_start, sequence, OPTIONS)
    low, high = first * OPTIONS.BLOCK_M, sequence.seqlen_q
    last_column = column_start + OPTIONS.BLOCK_N - 1
    if OPTIONS.CAUSAL:
        low = tl.maximum(low, last_column - diagonal)
    elif OPTIONS.WINDOW:
        low = tl.where(right < 0, low, tl.maximum(low, last_column - diagonal - right))
    if OPTIONS.WINDOW:
        high = tl.where(left < 0, high, tl.minimum(high, column_start - diagonal + left + 1))
    high = tl.where(last_column < sequence.seqlen_k, tl.maximum(high, 0), 0)
    full = tl.minimum(tl.cdiv(low, OPTIONS.BLOCK_M), end)
    return full, tl.maximum(full, high // OPTIONS.BLOCK_M)
