"""One step of the Hopper attention backward for heads wider than 128, in Gluon, of each of the two warpgroups.

wide/warps.py says how they share the work.
"""

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
from blocktune.kernels.hopper.backward.bounds import block_before
from blocktune.kernels.hopper.backward.steps import asked_of_pairs, per_query, weigh
from blocktune.kernels.hopper.backward.turns import report_added, take_turn
from blocktune.kernels.hopper.common.device_functions import add_out, advance, in_register_order
from blocktune.kernels.hopper.common.named_barriers import bar_arrive, bar_sync

# mypy: disable-error-code="assignment,var-annotated"

# Triton 3.9, whose copies have this name, gives every product registers of its own for the operand. That is more than
# there are for four products at once, and its ptxas would let no two instructions overlap.
COPIED: TritonTrait = gl.constexpr(hasattr(tma, "async_load"))

LATE = gl.constexpr(3)
"""The number of panels with which warpgroup 0 adds its second panel of dQ one step later (wide/warps.py)."""


@gluon.jit
def send(full, number: gl.constexpr, OPTIONS: gl.constexpr):
    """P (number 0) or dS (1) of this step is written."""
    if OPTIONS.NAMED_EXCHANGE:
        bar_arrive(8 + number, 256)
    else:
        mbarrier.arrive(full.index(number), count=1)


@gluon.jit
def receive(full, number: gl.constexpr, parity, OPTIONS: gl.constexpr):
    if OPTIONS.NAMED_EXCHANGE:
        bar_sync(8 + number, 256)
    else:
        mbarrier.wait(full.index(number), parity)


@gluon.jit
def from_register_order(x, S_L: gl.constexpr):
    """The inverse of `in_register_order`, for 64 columns."""
    # [64, 64]
    x = gl.permute(gl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(x, [64, 64]), S_L)


@gluon.jit
def hidden_zero():
    """0, as only the assembler knows, and anew in every step.

    Addresses of operands that it is a part of stay in the step, a few instructions on the uniform datapath. Those that
    LLVM knows to be the same in all steps, 44 numbers of 64 bits, it computes ahead of the loop, and they spill.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def product(a, b, slot, acc, FOLD: gl.constexpr):
    """a b^T over all panels, those of b in a slot, on top of `acc` if FOLD; not waited for."""
    PANELS: gl.constexpr = a.shape[0]
    start = hidden_zero()
    slot = slot + start
    # [BLOCK_N, BLOCK_M]
    acc = warpgroup_mma(a.index(start), b.index(slot * PANELS).permute((1, 0)), acc, use_acc=FOLD, is_async=True)
    for panel in gl.static_range(1, PANELS):
        acc = warpgroup_mma(a.index(start + panel), b.index(slot * PANELS + panel).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def accumulate(gradients, a, b, slot, PANELS: gl.constexpr):
    """Every panel of the gradients plus a times that panel of b in a slot; not waited for, unless COPIED."""
    # panels [BLOCK_N, 64]
    sums = ()
    slot = slot + hidden_zero()
    for panel in gl.static_range(PANELS):
        added = warpgroup_mma(a, b.index(slot * PANELS + panel), gradients[panel], is_async=True)
        if COPIED and PANELS == 4:
            added = warpgroup_mma_wait(0, deps=(added,))
        sums = sums + (added,)  # noqa: RUF005
    return sums


@gluon.jit
def issue_panel(ds, k_smem, panel: gl.constexpr, DQ_L: gl.constexpr):
    """dQ of one panel; not waited for."""
    # [BLOCK_M, 64]
    k_panel = k_smem.index(hidden_zero() + panel)
    zeros = gl.zeros([64, 64], gl.float32, DQ_L)
    return warpgroup_mma(ds.permute((1, 0)), k_panel, zeros, use_acc=False, is_async=True)


@gluon.jit
def give_panel(dq, steps, row, W: gl.constexpr, panel: gl.constexpr, PANELS: gl.constexpr):
    """Adds dQ of one panel to the sums of the 64 rows from `row` on."""
    memory = steps.memory
    # [64, 64]
    x = in_register_order(dq)
    tma.store_wait(0)
    memory.dq.index(W).store(x)
    fence_async_shared()
    add_out(steps.dq_desc, [(row // 64 * PANELS + panel) * 64, 0], memory.dq.index(W))


@gluon.jit
def give_held(
    gradients, steps, row, m, first, back, PANELS: gl.constexpr, V_PANELS: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """Adds the panel of LATE that is left of the block of queries before m, in a walk that began with `first`."""
    if PANELS == LATE:
        if m != first:
            give_panel(gradients[V_PANELS], steps, row + block_before(m, back, 64, OPTIONS), 0, 1, PANELS)


@gluon.jit
def report_before(m, first, parity, OPTIONS: gl.constexpr):
    """In a fixed order says that what the step before the one of m gave is added, in a walk that began with `first`."""
    if OPTIONS.ORDERED:
        report_added(parity ^ 1, gl.where(m != first, 1, 0))


@gluon.jit
def step_of_scores(
    steps, gradients, m, first, back, n0, row, bounds, slot, phase, do_slot, do_phase, parity,
    MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """Warpgroup 0: one block of queries from m on. gradients: the panels of dV, and of LATE one of dQ held back."""
    memory = steps.memory
    FOLD_LSE: gl.constexpr = OPTIONS.FOLD_LSE
    PANELS: gl.constexpr = memory.k.shape[0]
    V_PANELS: gl.constexpr = memory.v.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    place = row + m
    # [BLOCK_N, BLOCK_M]
    asked = asked_of_pairs(steps, m, OPTIONS, S_L)
    mbarrier.wait(memory.q_full.index(slot), phase)
    s_acc = per_query(memory.lse.index(slot), -1.0 / steps.scale_log2, FOLD_LSE, BLOCK_N, S_L)
    s_t = product(memory.k, memory.q, slot, s_acc, FOLD_LSE)
    if OPTIONS.ORDERED:
        give_held(gradients, steps, row, m, first, back, PANELS, V_PANELS, OPTIONS)
    s = warpgroup_mma_wait(0, deps=(s_t,))
    P_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    p_low, p = weigh(s, steps, slot, m, n0, bounds, asked, MASK, OPTIONS, S_L, P_L)
    memory.p.store(in_register_order(p))
    send(memory.exchanged, 0, OPTIONS)
    mbarrier.arrive(memory.q_empty.index(slot), count=1)
    mbarrier.wait(memory.do_full.index(do_slot), do_phase)
    # panels [BLOCK_N, 64]
    dv_t = accumulate(gradients, p_low, memory.do, do_slot, V_PANELS)
    if not OPTIONS.ORDERED:
        give_held(gradients, steps, row, m, first, back, PANELS, V_PANELS, OPTIONS)
    report_before(m, first, parity, OPTIONS)
    receive(memory.exchanged, 1, parity, OPTIONS)
    # panels [BLOCK_M, 64]
    dq_t = issue_panel(memory.ds, memory.k, 0, S_L)
    next_t = issue_panel(memory.ds, memory.k, 1, S_L)
    if V_PANELS == 4:
        v0, v1, v2, v3, dq = warpgroup_mma_wait(1, deps=(dv_t[0], dv_t[1], dv_t[2], dv_t[3], dq_t))
        gradients = (v0, v1, v2, v3)
    elif V_PANELS == 3:
        v0, v1, v2, dq = warpgroup_mma_wait(1, deps=(dv_t[0], dv_t[1], dv_t[2], dq_t))
        gradients = (v0, v1, v2)
    else:
        v0, v1, dq = warpgroup_mma_wait(1, deps=(dv_t[0], dv_t[1], dq_t))
        gradients = (v0, v1)
    mbarrier.arrive(memory.do_empty.index(do_slot), count=1)
    if OPTIONS.ORDERED:
        take_turn(parity, 0)
    give_panel(dq, steps, place, 0, 0, PANELS)
    dq = warpgroup_mma_wait(0, deps=(next_t,))
    if PANELS == LATE:
        gradients = gradients + (dq,)  # noqa: RUF005
    else:
        give_panel(dq, steps, place, 0, 1, PANELS)
    slot, phase = advance(slot, phase, OPTIONS.STAGES)
    do_slot, do_phase = advance(do_slot, do_phase, OPTIONS.DO_STAGES)
    return gradients, slot, phase, do_slot, do_phase, parity ^ 1


@gluon.jit
def step_of_gradients(
    steps, gradients, m, first, row, slot, phase, do_slot, do_phase, parity,
    OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """Warpgroup 1: one block of queries from m on; masks are in P already. gradients: the panels of dK."""
    memory = steps.memory
    FOLD_DELTA: gl.constexpr = OPTIONS.FOLD_DELTA
    dtype: gl.constexpr = memory.k.dtype
    PANELS: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    ORDER_L: gl.constexpr = in_register_order(gl.zeros([64, 64], gl.float32, S_L)).type.layout
    place = row + m
    # [BLOCK_N, BLOCK_M]
    mbarrier.wait(memory.do_full.index(do_slot), do_phase)
    dp_acc = per_query(memory.delta.index(do_slot), -1.0, FOLD_DELTA, BLOCK_N, S_L)
    dp_t = product(memory.v, memory.do, do_slot, dp_acc, FOLD_DELTA)
    report_before(m, first, parity, OPTIONS)
    receive(memory.exchanged, 0, parity, OPTIONS)
    p = from_register_order(memory.p.load(ORDER_L), S_L)
    dp = warpgroup_mma_wait(0, deps=(dp_t,))
    if not FOLD_DELTA:
        dp = dp - memory.delta.index(do_slot).load(gl.SliceLayout(0, S_L))[None, :]
    ds = (p * dp).to(dtype)
    memory.ds.store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, gl.DotOperandLayout(0, S_L, 2))
    send(memory.exchanged, 1, OPTIONS)
    mbarrier.arrive(memory.do_empty.index(do_slot), count=1)
    # panels [BLOCK_M, 64]
    dq_t = issue_panel(memory.ds, memory.k, 2, S_L)
    if PANELS == 4:
        next_t = issue_panel(memory.ds, memory.k, 3, S_L)
    mbarrier.wait(memory.q_full.index(slot), phase)
    # panels [BLOCK_N, 64]
    dk_t = accumulate(gradients, ds_low, memory.q, slot, PANELS)
    dq = warpgroup_mma_wait(0 if COPIED and PANELS == 4 else 2 * PANELS - 3, deps=(dq_t,))
    if OPTIONS.ORDERED:
        take_turn(parity, 1)
    give_panel(dq, steps, place, 1, 2, PANELS)
    if PANELS == 4:
        dq = warpgroup_mma_wait(0 if COPIED else PANELS, deps=(next_t,))
        give_panel(dq, steps, place, 1, 3, PANELS)
    gradients = warpgroup_mma_wait(0, deps=dk_t)
    mbarrier.arrive(memory.q_empty.index(slot), count=1)
    slot, phase = advance(slot, phase, OPTIONS.STAGES)
    do_slot, do_phase = advance(do_slot, do_phase, OPTIONS.DO_STAGES)
    return gradients, slot, phase, do_slot, do_phase, parity ^ 1
