"""The key tiles of the general forward: device functions that know every feature of a score."""

import triton
import triton.language as tl

from blocktune.kernels.portable.forward.arguments import SoftmaxState
from blocktune.kernels.portable.forward.pages import load_paged, load_pages
from blocktune.kernels.portable.forward.scores import full_tile_range, keep_tile, score_tile, tile_range
from blocktune.kernels.portable.forward.softmax import exact_step
from blocktune.kernels.portable.forward.tiles import load_matrix, no_state

# No module-level tl.constexpr: see kernels/portable/forward/tiles.py.


@triton.jit
def attend_tiles(
    q, keys, state, first, stop, row_start, sequence, scoring, dropout,
    BOUNDED: tl.constexpr, CHECK_KEYS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Attend to tiles first..stop-1: scores, softmax, dropout, product with V. Return the `SoftmaxState`.

    The maxima are in natural units if a score is more than a product, else unscaled. An additive mask may hide keys
    with -1e30, whose product with log2(e) is rounded by more than any exponent holds, and so are scores of 1e9:
    `exact_step` takes the difference first.
    acc is not divided by the share of the pairs that dropout keeps.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    acc, l_i, m_i = state
    rows = (row_start + tl.arange(0, acc.shape[0]))[:, None]
    if OPTIONS.PAGE_SIZE > 0:
        pages = load_pages(keys.table, first, sequence.seqlen_k, OPTIONS)
    for tile in tl.range(first, stop, num_stages=OPTIONS.STAGES):
        columns = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        # [BLOCK_N, WIDTH]
        if OPTIONS.PAGE_SIZE > 0:
            places, own_pages = tile * BLOCK_N + tl.arange(0, BLOCK_N), pages
            # a tile ahead: loads whose addresses are loaded in the same iteration run ahead less far
            pages = load_pages(keys.table, tile + 1, sequence.seqlen_k, OPTIONS)
            k = load_paged(
                keys.k, keys.k_page, own_pages, places, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, CHECK_KEYS, OPTIONS.PAGE_SIZE
            )
        else:
            k = load_matrix(keys.k, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM, OPTIONS.WIDTH, CHECK_KEYS)
        # [BLOCK_M, BLOCK_N]
        qk = tl.dot(q, k.T, input_precision=OPTIONS.PRECISION)
        scale = scoring.scale if OPTIONS.BIASED else 1.0
        scores, _ = score_tile(qk, rows, columns, scale, scoring, sequence, BOUNDED, CHECK_KEYS, OPTIONS)
        p, m_i, l_i, factor = exact_step(scores, m_i, l_i, log2_e if OPTIONS.BIASED else scoring.scale * log2_e)
        if OPTIONS.DROPOUT:
            p = tl.where(keep_tile(rows, tile * BLOCK_N, dropout, BLOCK_N, False), p, 0.0)
        # [BLOCK_N, WIDTH_V]
        if OPTIONS.PAGE_SIZE > 0:
            v = load_paged(
                keys.v, keys.v_page, own_pages, places, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, CHECK_KEYS,
                OPTIONS.PAGE_SIZE,
            )  # fmt: skip
        else:
            v = load_matrix(keys.v, tile * BLOCK_N, BLOCK_N, OPTIONS.HEAD_DIM_V, OPTIONS.WIDTH_V, CHECK_KEYS)
        # [BLOCK_M, WIDTH_V]
        acc = tl.dot(p.to(q.dtype), v, acc * factor[:, None], input_precision=OPTIONS.PRECISION)
    return SoftmaxState(acc, l_i, m_i)


@triton.jit
def attend_general(q, keys, row_start, sequence, scoring, dropout, OPTIONS: tl.constexpr):
    """Attend to all visible key tiles with q [BLOCK_M, WIDTH], and return the `SoftmaxState` of `attend_tiles`.

    Tiles that the window cuts at the left, tiles without any mask, tiles at the diagonal and at the end. A mask tensor
    has something to say in all of them, and only two kinds are told apart: whole tiles and the one at the end.
    """
    RAGGED: tl.constexpr = OPTIONS.RAGGED
    first, stop = tile_range(row_start, sequence, OPTIONS)
    full, full_stop = first, first
    if OPTIONS.MASK == 0:
        full, full_stop = full_tile_range(row_start, sequence, OPTIONS)
    state = no_state(OPTIONS)
    if OPTIONS.WINDOW and OPTIONS.MASK == 0:
        state = attend_tiles(q, keys, state, first, full, row_start, sequence, scoring, dropout, True, RAGGED, OPTIONS)
    if OPTIONS.MASK == 0:
        state = attend_tiles(
            q, keys, state, full, full_stop, row_start, sequence, scoring, dropout, False, False, OPTIONS
        )
    if OPTIONS.MASK != 0:
        full_stop = tl.minimum(stop, tl.maximum(first, sequence.seqlen_k // OPTIONS.BLOCK_N))
        state = attend_tiles(
            q, keys, state, first, full_stop, row_start, sequence, scoring, dropout, True, False, OPTIONS
        )
    if RAGGED or ((OPTIONS.CAUSAL or OPTIONS.WINDOW) and OPTIONS.MASK == 0):
        state = attend_tiles(
            q, keys, state, full_stop, stop, row_start, sequence, scoring, dropout, True, RAGGED, OPTIONS
        )
    log2_e: tl.constexpr = 1.4426950408889634
    # as `store_rows` takes it
    to_base_2 = log2_e if OPTIONS.BIASED else scoring.scale * log2_e
    return SoftmaxState(state.acc, state.l_i, state.m_i * to_base_2)
