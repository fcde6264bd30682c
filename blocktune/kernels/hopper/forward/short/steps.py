"""A step of the Hopper forward for short sequences, and how it gives slots and Q back, in Gluon.

What differs from kernels/hopper/forward/steps.py, whose other functions kernels/hopper/forward/short/warps.py uses,
too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import advance, pin
from blocktune.kernels.hopper.forward.bounds import hide
from blocktune.kernels.hopper.forward.copies import release, values_read
from blocktune.kernels.hopper.forward.row_maxima import softmax
from blocktune.kernels.hopper.forward.steps import add_product, finished, finished_and_kept, rescaled, scores


@gluon.jit
def pass_over(count, memory, slot, phase, STAGES: gl.constexpr, SPLIT_RELEASE: gl.constexpr):
    """Gives the slot at hand back and awaits the next one, `count` times. Without that wait an arrival would be ahead
    of its turn, and count for the slot's use before, which other warpgroups may not have finished."""
    for i in range(count):
        release(memory, slot, SPLIT_RELEASE)
        slot, phase = advance(slot, phase, STAGES)
        mbarrier.wait(memory.full.index(slot), phase)
    return slot, phase


@gluon.jit
def scores_read(memory, q_place, slot, last, SPLIT_RELEASE: gl.constexpr):
    """Gives K back once its scores are there, and Q once its last ones are."""
    if SPLIT_RELEASE:
        mbarrier.arrive(memory.k_empty.index(slot), count=1)
    if last:
        mbarrier.arrive(memory.q_empty.index(q_place), count=1)


@gluon.jit
def step(
    memory, q_place, state, slot, phase, previous, column, mask, scales, no_acc,
    OPTIONS: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr,
):  # fmt: skip
    """The scores of one block beside the second product of the block before, and its softmax beside that product.

    state: accumulators, probabilities (already converted if EARLY_P), factor of the accumulators, running maximum with
    its scale, and sums of the block before. column: the block's first key. mask: each row's last key, and the last
    column of which a block is wholly visible.
    """
    acc, p, factor, top, sums = state
    dtype: gl.constexpr = memory.q[0].dtype
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    # [64, BLOCK_N]
    qk_t = scores((memory.q[0].index(q_place),), memory.q, q_place, memory.k, slot, no_acc, False, 1)
    # [64, head_dim_v], beside the scores: rescale the accumulator, convert P, give the previous slot back
    acc = rescaled(acc, pin(factor), 1, O_L, O_L)
    if OPTIONS.EARLY_P:
        p_low = p
    else:
        p_low = gl.convert_layout(pin(p).to(dtype), P_L)
    values_read(memory, previous, OPTIONS.SPLIT_RELEASE)
    acc_t = add_product(p_low, memory.v, slot, acc, 1, P_L)
    # [64, BLOCK_N]: softmax, while the second product runs
    qk = warpgroup_mma_wait(1, deps=(qk_t,))
    scores_read(memory, q_place, slot, column == 0, OPTIONS.SPLIT_RELEASE)
    if OPTIONS.RIGHT and not OPTIONS.ALIGNED:
        last, highest = mask
        if column > highest:
            qk = hide(qk, last, None, column, True, False, S_L)
    # [64, BLOCK_N], its sums [64, 4]
    p, top, factor, added = softmax(qk, top, scales, S_L)
    sums = sums * factor + added
    previous = slot + 0
    slot, phase = advance(slot, phase, OPTIONS.STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(memory.full.index(slot), phase)
    if OPTIONS.KEEP_P:
        acc = finished_and_kept(acc_t, p_low, 1)
    else:
        acc = finished(acc_t, 1)
    if OPTIONS.EARLY_P:
        p = gl.convert_layout(pin(p).to(dtype), P_L)
    return (acc, p, factor, top, sums), slot, phase, previous
