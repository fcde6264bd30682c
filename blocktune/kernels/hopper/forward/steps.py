"""One step of the Hopper attention forward, in Gluon: its products and its softmax.

Tiles of shared memory are those of kernels/hopper/forward/copies.py.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import pin, reinterpret, tanh
from blocktune.kernels.hopper.common.rows import times_factor
from blocktune.kernels.hopper.common.sequences import hide
from blocktune.kernels.hopper.common.slots import next_slot
from blocktune.kernels.hopper.forward.biases import (
    add_biases,
    alibi_of_block,
    begins_with_alibi,
    begins_with_mask,
    distance_of_block,
    dropped,
    kept_of_block,
    loaded_of_block,
    mask_of_block,
)
from blocktune.kernels.hopper.forward.bounds import walks_round
from blocktune.kernels.hopper.forward.copies import release_values
from blocktune.kernels.hopper.forward.lines import line_of_block
from blocktune.kernels.hopper.forward.row_maxima import softmax


class Layouts(NamedTuple):
    """Register layouts of a consumer: scores, the numbers of their rows, accumulators (of all panels or the first two,
    and of the third), and probabilities as operands of both products."""

    scores: Any
    rows: Any
    out: Any
    rest: Any
    p: Any
    rest_p: Any


@gluon.constexpr_function
def layouts_of(block_n, width, panels):
    """Return the layouts of tiles of block_n keys and of `width` columns of values in one memory."""
    scores, out, rest = (
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
        for columns in (block_n, width, width if panels == 1 else width // 2)
    )
    p, rest_p = gl.DotOperandLayout(0, out, 2), gl.DotOperandLayout(0, rest, 2)
    # as constexprs, since Triton makes these of numbers alone where they are arguments
    return Layouts(*map(gl.constexpr, (scores, gl.SliceLayout(1, scores), out, rest, p, rest_p)))


class Tile(NamedTuple):
    """What all steps of a consumer's tile have in common.

    q: the operands that `queries` gives. scales: as `scales_of` has them. bend: of a
    soft cap. bias: `TileBiases`. no_acc: zeros like the scores [64, BLOCK_N].
    """

    memory: Any
    C: Any
    q: Any
    scales: Any
    bend: Any
    bias: Any
    no_acc: Any


class Block(NamedTuple):
    """A block of keys: its first one, its ALiBi (`Line`), whether it is `is_crossed`, and whether rows may not see all
    of it."""

    column: Any
    line: Any
    crossed: Any
    hidden: Any


class State(NamedTuple):
    """What a step leaves to the next one.

    acc: accumulators of the second product. p: probabilities, converted if EARLY_P, whose product is still to be
    added. factor: of the accumulators. top: the running maximum with its scale. sums: of the probabilities. loaded:
    what the next block needs of a mask tensor.
    """

    acc: Any
    p: Any
    factor: Any
    top: Any
    sums: Any
    loaded: Any


@gluon.jit
def columns_of(memory, PART: gl.constexpr, COLUMNS: gl.constexpr):
    """Return part PART of a tile [rows, width] that is cut into parts of COLUMNS: it lies in memory as these do."""
    ROWS: gl.constexpr = memory.shape[0]
    PARTS: gl.constexpr = memory.shape[1] // COLUMNS
    if PARTS == 1:
        return memory
    else:
        return reinterpret(memory, memory.dtype, [PARTS, ROWS, COLUMNS], memory.layout).index(PART)


@gluon.jit
def queries(q_smem, place, COLUMNS: gl.constexpr, S_L: gl.constexpr):
    """Return the operands of the first product, one for every part of a tile: the first COLUMNS columns of a
    warpgroup's queries in registers, which leaves shared memory to others, the rest where it is."""
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    first = q_smem[0].index(place)
    WIDTH: gl.constexpr = first.shape[1]
    if COLUMNS > 0:
        first = columns_of(first, 0, COLUMNS if COLUMNS < WIDTH else WIDTH).load(Q_L)
    if len(q_smem) == 1:
        return (first,)
    else:
        rest = q_smem[1].index(place)
        if COLUMNS > WIDTH:
            rest = rest.load(Q_L)
        return first, rest


@gluon.jit
def scores(q, memory, C: gl.constexpr, place, acc, UPON: gl.constexpr):
    """Issue Q K^T [64, BLOCK_N], upon an accumulator or (not UPON) alone. q: what `queries` gives."""
    q_tile, k_tile = memory.q[0].index(C), memory.k[0].index(place)
    COLUMNS: gl.constexpr = q[0].shape[1]
    qk = warpgroup_mma(q[0], columns_of(k_tile, 0, COLUMNS).permute((1, 0)), acc, use_acc=UPON, is_async=True)
    for part in gl.static_range(1, q_tile.shape[1] // COLUMNS):
        k_part = columns_of(k_tile, part, COLUMNS).permute((1, 0))
        qk = warpgroup_mma(columns_of(q_tile, part, COLUMNS), k_part, qk, is_async=True)
    if len(q) == 2:
        qk = warpgroup_mma(q[1], memory.k[1].index(place).permute((1, 0)), qk, is_async=True)
    return qk


@gluon.jit
def biased_scores(tile, place, block, loaded, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Issue the scores [64, BLOCK_N] of a block in slot `place`, upon ALiBi or a mask where that is possible."""
    if OPTIONS.LINES:
        acc = line_of_block(block.line.terms, tile.memory.places, tile.no_acc)
        return scores(tile.q, tile.memory, tile.C, place, acc, True)
    elif begins_with_mask(OPTIONS):
        acc = mask_of_block(loaded, tile.bias.launch.unit)
        return scores(tile.q, tile.memory, tile.C, place, acc, True)
    elif begins_with_alibi(OPTIONS):
        acc = alibi_of_block(block.column, block.line.slope, tile.bias, tile.no_acc, S_L)
        return scores(tile.q, tile.memory, tile.C, place, acc, True)
    else:
        return scores(tile.q, tile.memory, tile.C, place, tile.no_acc, False)


@gluon.jit
def no_sums(ROWS: gl.constexpr, WIDTH: gl.constexpr, PANELS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Return the accumulators of the second product: one, or two where V has three panels."""
    if PANELS == 1:
        return (gl.zeros([ROWS, WIDTH], gl.float32, LAYOUTS.out),)
    else:
        first = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUTS.out)
        return first, gl.zeros([ROWS, WIDTH // 2], gl.float32, LAYOUTS.rest)


@gluon.jit
def rescaled(acc, factor, LAYOUTS: gl.constexpr):
    """Return the accumulators times the factors of their rows [64, 4]."""
    if len(acc) == 1:
        return (times_factor(acc[0], factor, LAYOUTS.out),)
    else:
        return times_factor(acc[0], factor, LAYOUTS.out), times_factor(acc[1], factor, LAYOUTS.rest)


@gluon.jit
def add_product(p, v_smem, place, acc, LAYOUTS: gl.constexpr):
    """Issue acc += P V."""
    if len(acc) == 1:
        return (warpgroup_mma(p, v_smem[0].index(place), acc[0], is_async=True),)
    else:
        first = warpgroup_mma(p, v_smem[0].index(place), acc[0], is_async=True)
        rest_p = gl.convert_layout(p, LAYOUTS.rest_p)
        return first, warpgroup_mma(rest_p, v_smem[1].index(place), acc[1], is_async=True)


@gluon.jit
def finished(acc):
    """Return the accumulators, once no product is in flight."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(0, deps=(acc[0],)),)
    else:
        first, rest = warpgroup_mma_wait(0, deps=(acc[0], acc[1]))
        return first, rest


@gluon.jit
def finished_and_kept(acc, p):
    """Return `finished` accumulators, with P named in the wait, which changes nothing but ptxas' schedule."""
    if len(acc) == 1:
        first, p = warpgroup_mma_wait(0, deps=(acc[0], p))
        return (first,)
    else:
        first, rest, p = warpgroup_mma_wait(0, deps=(acc[0], acc[1], p))
        return first, rest


@gluon.jit
def step(tile, seen, state, slot, previous, block, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Compute the scores of one block beside the second product of the block before, and its softmax beside that
    product. seen: `MaskBounds` of the rows. previous: the place of the slot that is given back. Return the new state,
    slot and previous place."""
    memory, bias = tile.memory, tile.bias
    dtype: gl.constexpr = memory.q[0].dtype
    loaded = state.loaded
    # [64, BLOCK_N]
    qk_t = biased_scores(tile, slot.place, block, loaded, OPTIONS, LAYOUTS.scores)
    if begins_with_mask(OPTIONS):
        loaded = loaded_of_block(bias, gl.maximum(block.column - OPTIONS.BLOCK_N, 0), OPTIONS, LAYOUTS.scores)
    # [64, head_dim_v], beside the scores: rescale the accumulator, convert P, give the previous slot back
    acc = rescaled(state.acc, pin(state.factor), LAYOUTS)
    if OPTIONS.EARLY_P:
        p_low = state.p
    else:
        p_low = gl.convert_layout(pin(state.p).to(dtype), LAYOUTS.p)
    release_values(memory, previous, OPTIONS)
    v_slot = slot
    if OPTIONS.ONE_RING:
        v_slot = next_slot(slot, OPTIONS.STAGES)
        mbarrier.wait(memory.full.index(v_slot.place), v_slot.parity)
    acc_t = add_product(p_low, memory.v, v_slot.place, acc, LAYOUTS)
    kept = kept_of_block(bias, block.column, OPTIONS)
    # [64, BLOCK_N]: softmax, while the second product runs
    qk = warpgroup_mma_wait(len(acc), deps=(qk_t,))
    if OPTIONS.SPLIT_RELEASE or OPTIONS.ONE_RING:
        mbarrier.arrive(memory.k_empty.index(slot.place), count=1)
    if OPTIONS.SOFTCAP:
        qk = tanh(qk * tile.bend)
    qk = add_biases(qk, block, loaded, bias, tile.no_acc, OPTIONS, LAYOUTS.scores)
    if not begins_with_mask(OPTIONS):
        loaded = loaded_of_block(bias, gl.maximum(block.column - OPTIONS.BLOCK_N, 0), OPTIONS, LAYOUTS.scores)
    # a walk that goes round comes to the last block late
    if (walks_round(OPTIONS) and OPTIONS.RAGGED) or ((OPTIONS.RIGHT or OPTIONS.LEFT) and not OPTIONS.ALIGNED):
        if block.hidden:
            qk = hide(qk, seen.rows, block.column, OPTIONS, LAYOUTS.scores)
    # [64, BLOCK_N], its sums [64, 4]
    distance = None
    if OPTIONS.LINES:
        distance = distance_of_block(block.column, block.line.slope, bias)
    p, top, factor, added = softmax(qk, state.top, tile.scales, LAYOUTS.scores, distance, OPTIONS.MASK == 2)
    p = dropped(p, kept, OPTIONS.DROPOUT, LAYOUTS.scores)
    sums = state.sums * factor + added
    previous = v_slot.place + 0
    slot = next_slot(v_slot, OPTIONS.STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(memory.full.index(slot.place), slot.parity)
    if OPTIONS.KEEP_P:
        acc = finished_and_kept(acc_t, p_low)
    else:
        acc = finished(acc_t)
    if OPTIONS.EARLY_P:
        p = gl.convert_layout(pin(p).to(dtype), LAYOUTS.p)
    return State(acc=acc, p=p, factor=factor, top=top, sums=sums, loaded=loaded), slot, previous
