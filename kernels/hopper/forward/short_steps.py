"""A step of the Hopper forward for short sequences, and how it gives slots and Q back, in Gluon.

What differs from kernels/hopper/forward/steps.py, whose other functions kernels/hopper/forward/short_warps.py uses,
too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import advance, pin, row_max, thread_sum, times_rows
from blocktune.kernels.hopper.forward.steps import (
    add_product,
    finished,
    finished_and_kept,
    hide,
    release,
    rescaled,
    scores,
)


@gluon.jit
def pass_over(
    count, full, k_empty, v_empty, slot, phase, STAGES: gl.constexpr, SPLIT_RELEASE: gl.constexpr,
):  # fmt: skip
    """Gives the slot at hand back and awaits the next one, `count` times. Without that wait an arrival would be ahead
    of its turn, and count for the slot's use before, which other warpgroups may not have finished."""
    for i in range(count):
        release(k_empty, v_empty, slot, SPLIT_RELEASE)
        slot, phase = advance(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
    return slot, phase


@gluon.jit
def values_read(k_empty, v_empty, slot, SPLIT_RELEASE: gl.constexpr):
    """Gives a slot back whose V is read: all of it, or with separate releases what its K left."""
    if SPLIT_RELEASE:
        mbarrier.arrive(v_empty.index(slot), count=1)
    else:
        mbarrier.arrive(k_empty.index(slot), count=1)


@gluon.jit
def scores_read(memory, q_place, slot, last, SPLIT_RELEASE: gl.constexpr):
    """Gives K back once its scores are there, and Q once its last ones are."""
    _, _, _, _, k_empty, _, q_empty = memory
    if SPLIT_RELEASE:
        mbarrier.arrive(k_empty.index(slot), count=1)
    if last:
        mbarrier.arrive(q_empty.index(q_place), count=1)


@gluon.jit
def step(
    memory, q_place, state, slot, phase, previous, column, mask, scale, no_acc,
    ALIGNED: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr, SPLIT_RELEASE: gl.constexpr,
    EARLY_P: gl.constexpr, KEEP_P: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr,
):  # fmt: skip
    """The scores of one block beside the second product of the block before, and its softmax beside that product.

    state: accumulators, probabilities (already converted if EARLY_P), factor of the accumulators, running maximum and
    sums of the block before. column: the block's first key. mask: each row's last key, and the last column of which a
    block is wholly visible.
    """
    q_smem, k_smem, v_smem, full, k_empty, v_empty, _ = memory
    acc, p, factor, maximum, sums = state
    TAU: gl.constexpr = 8.0
    dtype: gl.constexpr = q_smem[0].dtype
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    qk_t = scores(q_smem, q_place, k_smem, slot, no_acc, 1)
    # beside the scores: rescale the accumulator, convert P, give the previous slot back
    acc = rescaled(acc, pin(factor), 1, O_L, O_L)
    if EARLY_P:
        p_low = p
    else:
        p_low = gl.convert_layout(pin(p).to(dtype), P_L)
    values_read(k_empty, v_empty, previous, SPLIT_RELEASE)
    acc_t = add_product(p_low, v_smem, slot, acc, 1, P_L)
    qk = warpgroup_mma_wait(1, deps=(qk_t,))
    scores_read(memory, q_place, slot, column == 0, SPLIT_RELEASE)
    # softmax, while the second product runs
    if RIGHT and not ALIGNED:
        last, highest = mask
        if column > highest:
            qk = hide(qk, last, None, column, True, False, S_L)
    new = gl.maximum(maximum, row_max(qk, ROW_S) * scale)
    new = gl.where(new - maximum > TAU, new, maximum)
    p = gl.exp2(qk * scale - new[:, None])
    factor = gl.exp2(maximum - new)
    sums = times_rows(sums, factor) + thread_sum(p)
    previous = slot + 0
    slot, phase = advance(slot, phase, STAGES)
    # operands of the next step; also the branch that keeps the wait for the product below the softmax
    mbarrier.wait(full.index(slot), phase)
    if KEEP_P:
        acc = finished_and_kept(acc_t, p_low, 1)
    else:
        acc = finished(acc_t, 1)
    if EARLY_P:
        p = gl.convert_layout(pin(p).to(dtype), P_L)
    return (acc, p, factor, new, sums), slot, phase, previous
