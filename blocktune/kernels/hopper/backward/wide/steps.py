"""One step of the Hopper attention backward for heads wider than 128, in Gluon, of each of the two warpgroups.

wide/warps.py says how they share the work.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blocktune.kernels.base.source_hash import TritonTrait
from blocktune.kernels.hopper.backward.barriers import await_product, report_added, send, take_turn
from blocktune.kernels.hopper.backward.bounds import block_before
from blocktune.kernels.hopper.backward.steps import initial_sums, pairs_of_block, weigh
from blocktune.kernels.hopper.common.device_functions import add_out, in_register_order
from blocktune.kernels.hopper.common.slots import next_slot

# mypy: disable-error-code="assignment,var-annotated"

# Triton 3.9, whose copies have this name, gives every product registers of its own for the operand. That is more than
# there are for four products at once, and its ptxas would let no two instructions overlap.
COPIED: TritonTrait = gl.constexpr(hasattr(tma, "async_load"))

LATE = gl.constexpr(3)
"""The number of panels with which warpgroup 0 adds its second panel of dQ one step later (wide/warps.py)."""


class WideState(NamedTuple):
    """What a step leaves to the next one: the panels of the gradient that the warpgroup sums, of LATE in warpgroup 0
    also one of dQ that is held back; the next slots of Q and of dO; and the parity of the next step."""

    gradients: Any
    slot: Any
    do_slot: Any
    parity: Any


@gluon.jit
def from_register_order(x, S_L: gl.constexpr):
    """Undo `in_register_order`, for 64 columns."""
    # [64, 64]
    x = gl.permute(gl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(x, [64, 64]), S_L)


@gluon.jit
def hidden_zero():
    """Return 0, as only the assembler knows, and anew in every step.

    Addresses of operands that it is a part of stay in the step, a few instructions on the uniform datapath. Those that
    LLVM knows to be the same in all steps, 44 numbers of 64 bits, it computes ahead of the loop, and they spill.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def product(a, b, place, acc, FOLD: gl.constexpr):
    """Issue a b^T over all panels, those of b in slot `place`, on top of `acc` if FOLD."""
    PANELS: gl.constexpr = a.shape[0]
    start = hidden_zero()
    place = place + start
    # [BLOCK_N, BLOCK_M]
    acc = warpgroup_mma(a.index(start), b.index(place * PANELS).permute((1, 0)), acc, use_acc=FOLD, is_async=True)
    for panel in gl.static_range(1, PANELS):
        acc = warpgroup_mma(a.index(start + panel), b.index(place * PANELS + panel).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def accumulate(gradients, a, b, place, PANELS: gl.constexpr):
    """Add a times a panel of b, in slot `place`, to that panel of the gradients; do not wait, unless COPIED."""
    # panels [BLOCK_N, 64]
    sums = ()
    place = place + hidden_zero()
    for panel in gl.static_range(PANELS):
        added = warpgroup_mma(a, b.index(place * PANELS + panel), gradients[panel], is_async=True)
        if COPIED and PANELS == 4:
            added = warpgroup_mma_wait(0, deps=(added,))
        sums = sums + (added,)  # noqa: RUF005
    return sums


@gluon.jit
def issue_panel(ds, k_smem, panel: gl.constexpr, DQ_L: gl.constexpr):
    """Issue dQ of one panel."""
    # [BLOCK_M, 64]
    k_panel = k_smem.index(hidden_zero() + panel)
    zeros = gl.zeros([64, 64], gl.float32, DQ_L)
    return warpgroup_mma(ds.permute((1, 0)), k_panel, zeros, use_acc=False, is_async=True)


@gluon.jit
def give_panel(dq, inputs, row, W: gl.constexpr, panel: gl.constexpr, OPTIONS: gl.constexpr):
    """Add dQ of one panel to the sums of the 64 rows from `row` on."""
    room = inputs.memory.dq.index(W)
    # [64, 64]
    x = in_register_order(dq)
    tma.store_wait(0)
    room.store(x)
    fence_async_shared()
    add_out(inputs.tensors.dq, [(row // 64 * OPTIONS.PANELS + panel) * 64, 0], room)


@gluon.jit
def give_held(state, inputs, head, m, start, OPTIONS: gl.constexpr):
    """Add the panel of LATE that is left of the block of queries before m, in a walk that began with `start`."""
    if OPTIONS.PANELS == LATE:
        if m != start:
            before = block_before(m, head.walk.back, OPTIONS)
            give_panel(state.gradients[OPTIONS.V_PANELS], inputs, head.row + before, 0, 1, OPTIONS)


@gluon.jit
def report_before(m, start, parity, OPTIONS: gl.constexpr):
    """Report in a fixed order that what the step before the one of m gave is added, in a walk that began with
    `start`."""
    if OPTIONS.ORDERED:
        report_added(parity ^ 1, gl.where(m != start, 1, 0))


@gluon.jit
def step_of_scores(
    inputs, tile, head, m, start, state, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr
):  # fmt: skip
    """Compute the scores of one block of queries from m on, and sum dV: warpgroup 0. Return the new state."""
    memory = inputs.memory
    FOLD_LSE: gl.constexpr = OPTIONS.FOLD_LSE
    PANELS: gl.constexpr = OPTIONS.PANELS
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    slot, do_slot, parity = state.slot, state.do_slot, state.parity
    row = head.row + m
    # [BLOCK_N, BLOCK_M]
    pairs = pairs_of_block(inputs, head, m, OPTIONS, S_L)
    mbarrier.wait(memory.q_full.index(slot.place), slot.parity)
    s_acc = initial_sums(memory.lse.index(slot.place), -1.0 / inputs.scaling.scale_log2, FOLD_LSE, S_L)
    s_t = product(memory.k, memory.q, slot.place, s_acc, FOLD_LSE)
    if OPTIONS.ORDERED:
        give_held(state, inputs, head, m, start, OPTIONS)
    s = warpgroup_mma_wait(0, deps=(s_t,))
    P_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    p_low, p = weigh(s, inputs, tile, head, slot.place, m, pairs, 0, MASK, OPTIONS, S_L, P_L)
    memory.p.store(in_register_order(p))
    send(memory, 0, OPTIONS)
    mbarrier.arrive(memory.q_empty.index(slot.place), count=1)
    mbarrier.wait(memory.do_full.index(do_slot.place), do_slot.parity)
    # panels [BLOCK_N, 64]
    dv_t = accumulate(state.gradients, p_low, memory.do, do_slot.place, V_PANELS)
    if not OPTIONS.ORDERED:
        give_held(state, inputs, head, m, start, OPTIONS)
    report_before(m, start, parity, OPTIONS)
    await_product(memory, 1, parity, OPTIONS)
    # panels [BLOCK_M, 64]
    dq_t = issue_panel(memory.ds, memory.k, 0, S_L)
    next_t = issue_panel(memory.ds, memory.k, 1, S_L)
    waited = warpgroup_mma_wait(1, deps=dv_t + (dq_t,))  # noqa: RUF005
    gradients, dq = waited[:V_PANELS], waited[V_PANELS]
    mbarrier.arrive(memory.do_empty.index(do_slot.place), count=1)
    if OPTIONS.ORDERED:
        take_turn(parity, 0)
    give_panel(dq, inputs, row, 0, 0, OPTIONS)
    dq = warpgroup_mma_wait(0, deps=(next_t,))
    if PANELS == LATE:
        gradients = gradients + (dq,)  # noqa: RUF005
    else:
        give_panel(dq, inputs, row, 0, 1, OPTIONS)
    return WideState(gradients, next_slot(slot, OPTIONS.STAGES), next_slot(do_slot, OPTIONS.DO_STAGES), parity ^ 1)


@gluon.jit
def step_of_gradients(inputs, head, m, start, state, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Compute dS of one block of queries from m on, and sum dK: warpgroup 1. Masks are in P already. Return the new
    state."""
    memory = inputs.memory
    FOLD_DELTA: gl.constexpr = OPTIONS.FOLD_DELTA
    PANELS: gl.constexpr = OPTIONS.PANELS
    ORDER_L: gl.constexpr = in_register_order(gl.zeros([64, 64], gl.float32, S_L)).type.layout
    slot, do_slot, parity = state.slot, state.do_slot, state.parity
    row = head.row + m
    # [BLOCK_N, BLOCK_M]
    mbarrier.wait(memory.do_full.index(do_slot.place), do_slot.parity)
    dp_acc = initial_sums(memory.delta.index(do_slot.place), -1.0, FOLD_DELTA, S_L)
    dp_t = product(memory.v, memory.do, do_slot.place, dp_acc, FOLD_DELTA)
    report_before(m, start, parity, OPTIONS)
    await_product(memory, 0, parity, OPTIONS)
    p = from_register_order(memory.p.load(ORDER_L), S_L)
    dp = warpgroup_mma_wait(0, deps=(dp_t,))
    if not FOLD_DELTA:
        dp = dp - memory.delta.index(do_slot.place).load(gl.SliceLayout(0, S_L))[None, :]
    ds = (p * dp).to(memory.k.dtype)
    memory.ds.store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, gl.DotOperandLayout(0, S_L, 2))
    send(memory, 1, OPTIONS)
    mbarrier.arrive(memory.do_empty.index(do_slot.place), count=1)
    # panels [BLOCK_M, 64]
    dq_t = issue_panel(memory.ds, memory.k, 2, S_L)
    if PANELS == 4:
        next_t = issue_panel(memory.ds, memory.k, 3, S_L)
    mbarrier.wait(memory.q_full.index(slot.place), slot.parity)
    # panels [BLOCK_N, 64]
    dk_t = accumulate(state.gradients, ds_low, memory.q, slot.place, PANELS)
    dq = warpgroup_mma_wait(0 if COPIED and PANELS == 4 else 2 * PANELS - 3, deps=(dq_t,))
    if OPTIONS.ORDERED:
        take_turn(parity, 1)
    give_panel(dq, inputs, row, 1, 2, OPTIONS)
    if PANELS == 4:
        dq = warpgroup_mma_wait(0 if COPIED else PANELS, deps=(next_t,))
        give_panel(dq, inputs, row, 1, 3, OPTIONS)
    gradients = warpgroup_mma_wait(0, deps=dk_t)
    mbarrier.arrive(memory.q_empty.index(slot.place), count=1)
    return WideState(gradients, next_slot(slot, OPTIONS.STAGES), next_slot(do_slot, OPTIONS.DO_STAGES), parity ^ 1)
