"""A step of the Hopper forward for short sequences, and how it gives slots and Q back, in Gluon.

What differs from kernels/hopper/forward/steps.py, whose other functions kernels/hopper/forward/short/warps.py uses,
too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import pin
from blocktune.kernels.hopper.common.sequences import hide
from blocktune.kernels.hopper.common.slots import next_slot
from blocktune.kernels.hopper.forward.copies import release, release_values
from blocktune.kernels.hopper.forward.row_maxima import softmax
from blocktune.kernels.hopper.forward.steps import State, add_product, finished, finished_and_kept, rescaled, scores


@gluon.jit
def pass_over(count, memory, slot, OPTIONS: gl.constexpr):
    """Give the slot at hand back and await the next one, `count` times. Return it. Without that wait an arrival would
    be ahead of its turn, and count for the slot's use before, which other warpgroups may not have finished."""
    for i in range(count):
        release(memory, slot.place, OPTIONS)
        slot = next_slot(slot, OPTIONS.STAGES)
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
    return slot


@gluon.jit
def release_keys(memory, C: gl.constexpr, place, last, OPTIONS: gl.constexpr):
    """Give K back once its scores are there, and Q once its last ones are."""
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.arrive(memory.k_empty.index(place), count=1)
    if last:
        mbarrier.arrive(memory.q_empty.index(C), count=1)


@gluon.jit
def step(tile, seen, state, slot, previous, column, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Compute the scores of the block of keys from `column` on beside the second product of the block before, and its
    softmax beside that product. seen: `MaskBounds` of the rows. previous: the place of the slot that is given back.
    Return the new state, slot and previous place."""
    memory = tile.memory
    dtype: gl.constexpr = memory.q[0].dtype
    # [64, BLOCK_N]
    qk_t = scores(tile.q, memory, tile.C, slot.place, tile.no_acc, False)
    # [64, head_dim_v], beside the scores: rescale the accumulator, convert P, give the previous slot back
    acc = rescaled(state.acc, pin(state.factor), LAYOUTS)
    if OPTIONS.EARLY_P:
        p_low = state.p
    else:
        p_low = gl.convert_layout(pin(state.p).to(dtype), LAYOUTS.p)
    release_values(memory, previous, OPTIONS)
    acc_t = add_product(p_low, memory.v, slot.place, acc, LAYOUTS)
    # [64, BLOCK_N]: softmax, while the second product runs
    qk = warpgroup_mma_wait(1, deps=(qk_t,))
    release_keys(memory, tile.C, slot.place, column == 0, OPTIONS)
    if OPTIONS.RIGHT and not OPTIONS.ALIGNED:
        if column > seen.highest:
            qk = hide(qk, seen.rows, column, OPTIONS, LAYOUTS.scores)
    # [64, BLOCK_N], its sums [64, 4]
    p, top, factor, added = softmax(qk, state.top, tile.scales, LAYOUTS.scores)
    sums = state.sums * factor + added
    previous = slot.place + 0
    slot = next_slot(slot, OPTIONS.STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(memory.full.index(slot.place), slot.parity)
    if OPTIONS.KEEP_P:
        acc = finished_and_kept(acc_t, p_low)
    else:
        acc = finished(acc_t)
    if OPTIONS.EARLY_P:
        p = gl.convert_layout(pin(p).to(dtype), LAYOUTS.p)
    return State(acc=acc, p=p, factor=factor, top=top, sums=sums, loaded=0), slot, previous
