"""One step of the Hopper attention forward, in Gluon: its products and its softmax.

Tiles of shared memory are those of kernels/hopper/forward/copies.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import advance, pin, reinterpret, tanh
from blocktune.kernels.hopper.common.rows import times_factor
from blocktune.kernels.hopper.forward.biases import (
    alibi_of_block,
    begins_with_alibi,
    begins_with_mask,
    biased,
    distance_of_block,
    dropped,
    kept_of_block,
    loaded_of_block,
    mask_of_block,
)
from blocktune.kernels.hopper.forward.bounds import hide, walks_round
from blocktune.kernels.hopper.forward.copies import values_read
from blocktune.kernels.hopper.forward.lines import line_of_block
from blocktune.kernels.hopper.forward.row_maxima import softmax


@gluon.jit
def columns_of(memory, PART: gl.constexpr, COLUMNS: gl.constexpr):
    """Part PART of a tile [rows, width] that is cut into parts of COLUMNS: it lies in memory as these do."""
    ROWS: gl.constexpr = memory.shape[0]
    PARTS: gl.constexpr = memory.shape[1] // COLUMNS
    if PARTS == 1:
        return memory
    else:
        return reinterpret(memory, memory.dtype, [PARTS, ROWS, COLUMNS], memory.layout).index(PART)


@gluon.jit
def queries(q_smem, place, COLUMNS: gl.constexpr, PANELS: gl.constexpr, S_L: gl.constexpr):
    """The operands of the first product, one for every part of a tile: the first COLUMNS columns of a warpgroup's
    queries in registers, which leaves shared memory to others, the rest where it is."""
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    first = q_smem[0].index(place)
    WIDTH: gl.constexpr = first.shape[1]
    if COLUMNS > 0:
        first = columns_of(first, 0, COLUMNS if COLUMNS < WIDTH else WIDTH).load(Q_L)
    if PANELS == 1:
        return (first,)
    else:
        rest = q_smem[1].index(place)
        if COLUMNS > WIDTH:
            rest = rest.load(Q_L)
        return first, rest


@gluon.jit
def scores(q, q_smem, q_place, k_smem, slot, acc, UPON: gl.constexpr, PANELS: gl.constexpr):
    """Issues Q K^T [64, BLOCK_N], upon an accumulator or (not UPON) alone. q: what `queries` gives."""
    q_tile, k_tile = q_smem[0].index(q_place), k_smem[0].index(slot)
    COLUMNS: gl.constexpr = q[0].shape[1]
    qk = warpgroup_mma(q[0], columns_of(k_tile, 0, COLUMNS).permute((1, 0)), acc, use_acc=UPON, is_async=True)
    for part in gl.static_range(1, q_tile.shape[1] // COLUMNS):
        k_part = columns_of(k_tile, part, COLUMNS).permute((1, 0))
        qk = warpgroup_mma(columns_of(q_tile, part, COLUMNS), k_part, qk, is_async=True)
    if PANELS == 3:
        qk = warpgroup_mma(q[1], k_smem[1].index(slot).permute((1, 0)), qk, is_async=True)
    return qk


@gluon.jit
def biased_scores(memory, q, place, slot, column, no_acc, loaded, bias, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Issues the scores [64, BLOCK_N] of the keys from `column` on, upon ALiBi where that is possible."""
    biases, tile_biases, row_start, moved, _ = bias
    if OPTIONS.LINES:
        _, _, _, terms, _ = tile_biases
        line = line_of_block(terms, memory.places, no_acc)
        return scores(q, memory.q, place, memory.k, slot, line, True, OPTIONS.QK_PANELS)
    elif begins_with_mask(OPTIONS):
        acc = mask_of_block(loaded, biases.unit)
        return scores(q, memory.q, place, memory.k, slot, acc, True, OPTIONS.QK_PANELS)
    elif begins_with_alibi(OPTIONS):
        acc = alibi_of_block(column, row_start, moved, no_acc, biases, tile_biases, S_L)
        return scores(q, memory.q, place, memory.k, slot, acc, True, OPTIONS.QK_PANELS)
    else:
        return scores(q, memory.q, place, memory.k, slot, no_acc, False, OPTIONS.QK_PANELS)


@gluon.jit
def no_sums(ROWS: gl.constexpr, PANELS: gl.constexpr, W: gl.constexpr, O_L: gl.constexpr, REST_L: gl.constexpr):
    """The accumulators of the second product: one, or two where V has three panels."""
    if PANELS == 1:
        return (gl.zeros([ROWS, W], gl.float32, O_L),)
    else:
        return gl.zeros([ROWS, 2 * W], gl.float32, O_L), gl.zeros([ROWS, W], gl.float32, REST_L)


@gluon.jit
def rescaled(acc, factor, PANELS: gl.constexpr, O_L: gl.constexpr, REST_L: gl.constexpr):
    """The accumulators times the factors of their rows [64, 4]."""
    if PANELS == 1:
        return (times_factor(acc[0], factor, O_L),)
    else:
        return times_factor(acc[0], factor, O_L), times_factor(acc[1], factor, REST_L)


@gluon.jit
def add_product(p, v_smem, slot, acc, PANELS: gl.constexpr, REST_P: gl.constexpr):
    """Issues acc += P V."""
    if PANELS == 1:
        return (warpgroup_mma(p, v_smem[0].index(slot), acc[0], is_async=True),)
    else:
        first = warpgroup_mma(p, v_smem[0].index(slot), acc[0], is_async=True)
        return first, warpgroup_mma(gl.convert_layout(p, REST_P), v_smem[1].index(slot), acc[1], is_async=True)


@gluon.jit
def finished(acc, PANELS: gl.constexpr):
    """The accumulators, once no product is in flight."""
    if PANELS == 1:
        return (warpgroup_mma_wait(0, deps=(acc[0],)),)
    else:
        first, rest = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
        return first, rest


@gluon.jit
def finished_and_kept(acc, p, PANELS: gl.constexpr):
    """`finished`, with P named in the wait, which changes nothing but ptxas' schedule."""
    if PANELS == 1:
        first, p = warpgroup_mma_wait(0, deps=(acc[0], p))
        return (first,)
    else:
        first, rest, p = warpgroup_mma_wait(0, deps=(acc[0], acc[1], p))
        return first, rest


@gluon.jit
def step(
    memory, q, q_place, state, slot, phase, previous, block, seen, scales, bend, no_acc, bias,
    OPTIONS: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr, REST_L: gl.constexpr,
):  # fmt: skip
    """The scores of one block beside the second product of the block before, and its softmax beside that product.

    state: accumulators, probabilities (already converted if EARLY_P), factor of the accumulators, running maximum with
    its scale, and sums of the block before; what this block needs of a mask tensor. block: its first key, whether it
    is `is_crossed`, and whether rows may not see all of it. seen: each row's last and first key. bias: `Biases`,
    `biases_of_block`, the first row, the distance of the tile's diagonal from that of all, and batch * num_heads +
    head.
    """
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    acc, p, factor, top, sums, loaded = state
    dtype: gl.constexpr = memory.q[0].dtype
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    REST_P: gl.constexpr = gl.DotOperandLayout(0, REST_L, 2)
    biases, tile_biases, row_start, moved, batch_head = bias
    column, crossed, hides = block
    # [64, BLOCK_N]
    qk_t = biased_scores(memory, q, q_place, slot, column, no_acc, loaded, bias, OPTIONS, S_L)
    if begins_with_mask(OPTIONS):
        loaded = loaded_of_block(tile_biases, gl.maximum(column - OPTIONS.BLOCK_N, 0), OPTIONS, S_L)
    # [64, head_dim_v], beside the scores: rescale the accumulator, convert P, give the previous slot back
    acc = rescaled(acc, pin(factor), V_PANELS, O_L, REST_L)
    if OPTIONS.EARLY_P:
        p_low = p
    else:
        p_low = gl.convert_layout(pin(p).to(dtype), P_L)
    values_read(memory, previous, OPTIONS.SPLIT_RELEASE)
    v_slot = slot + 0
    if OPTIONS.ONE_RING:
        v_slot, phase = advance(slot, phase, OPTIONS.STAGES)
        mbarrier.wait(memory.full.index(v_slot), phase)
    acc_t = add_product(p_low, memory.v, v_slot, acc, V_PANELS, REST_P)
    kept = kept_of_block(biases, tile_biases, row_start, column, batch_head, OPTIONS)
    # [64, BLOCK_N]: softmax, while the second product runs
    qk = warpgroup_mma_wait(1 if V_PANELS == 1 else 2, deps=(qk_t,))
    if OPTIONS.SPLIT_RELEASE or OPTIONS.ONE_RING:
        mbarrier.arrive(memory.k_empty.index(slot), count=1)
    if OPTIONS.SOFTCAP:
        qk = tanh(qk * bend)
    qk = biased(qk, column, crossed, row_start, moved, loaded, no_acc, biases, tile_biases, OPTIONS, S_L)
    if not begins_with_mask(OPTIONS):
        loaded = loaded_of_block(tile_biases, gl.maximum(column - OPTIONS.BLOCK_N, 0), OPTIONS, S_L)
    # a walk that goes round comes to the last block late
    if (walks_round(OPTIONS) and OPTIONS.RAGGED) or ((OPTIONS.RIGHT or OPTIONS.LEFT) and not OPTIONS.ALIGNED):
        if hides:
            last, first = seen
            qk = hide(qk, last, first, column, OPTIONS.RAGGED or OPTIONS.RIGHT, OPTIONS.LEFT, S_L)
    # [64, BLOCK_N], its sums [64, 4]
    distance = None
    if OPTIONS.LINES:
        distance = distance_of_block(column, row_start, moved, biases, tile_biases)
    p, top, factor, added = softmax(qk, top, scales, S_L, distance, OPTIONS.MASK == 2)
    p = dropped(p, kept, OPTIONS.DROPOUT, S_L)
    sums = sums * factor + added
    previous = v_slot + 0
    slot, phase = advance(v_slot, phase, OPTIONS.STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(memory.full.index(slot), phase)
    if OPTIONS.KEEP_P:
        acc = finished_and_kept(acc_t, p_low, V_PANELS)
    else:
        acc = finished(acc_t, V_PANELS)
    if OPTIONS.EARLY_P:
        p = gl.convert_layout(pin(p).to(dtype), P_L)
    return (acc, p, factor, top, sums, loaded), slot, phase, previous
