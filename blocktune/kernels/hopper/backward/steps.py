"""One step of the Hopper attention backward, in Gluon: a block of queries against 64 keys of a warpgroup.

warps.py says what makes it fast.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from blocktune.kernels.hopper.backward.adders import give_dq
from blocktune.kernels.hopper.backward.arguments import Head, Pairs
from blocktune.kernels.hopper.backward.barriers import await_ds, release, send_ds
from blocktune.kernels.hopper.backward.bounds import block_at, keep_seen, rotate, walk_of_head
from blocktune.kernels.hopper.backward.tiles import head_row
from blocktune.kernels.hopper.biases.of_keys import (
    bias_exponents,
    biases_of_head,
    choose_slopes,
    drop_pairs,
    hide_pairs,
    kept_pairs,
    mask_of_block,
)
from blocktune.kernels.hopper.common.device_functions import tanh
from blocktune.kernels.hopper.common.slots import Slot, next_slot


class Layouts(NamedTuple):
    """Register layouts of a warpgroup: scores, gradients of keys, its half of dQ, and P as an operand; and, with TAIL,
    gradients beyond 64 columns and P as an operand of these."""

    scores: Any
    gradients: Any
    dq: Any
    p: Any
    tail: Any
    tail_p: Any


class Operands(NamedTuple):
    """K and V of a warpgroup's keys and K of all, transposed if DEFER, as operands: in registers or in memory."""

    k: Any
    v: Any
    all_k: Any


class State(NamedTuple):
    """What a step leaves to the next one: the panels of dK and dV, the next slot of Q and dO and that of dS."""

    dk: Any
    dv: Any
    slot: Any
    ds: Any


@gluon.constexpr_function
def layouts_of(options, width, w):
    """Return the layouts of warpgroup `w` for tiles of `width` columns."""
    tail = options.TAIL
    of_dq = (64, tail)[w] if tail else options.BLOCK_M // 2 if options.DEFER else width // 2
    columns = options.BLOCK_M, 64 if tail else width, of_dq, tail or width
    scores, gradients, dq, rest = (
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, count, 16])
        for count in columns
    )
    p, rest_p = gl.DotOperandLayout(0, gradients, 2), gl.DotOperandLayout(0, rest, 2)
    # as constexprs, since Triton makes these of numbers alone where they are arguments
    return Layouts(*map(gl.constexpr, (scores, gradients, dq, p, rest, rest_p)))


@gluon.jit
def settle_products():
    """Wait for products when none was issued.

    Without such a wait ptxas takes accumulators that are filled for the results of earlier products, and lets the first
    loop of a kernel wait for S before it issues dP (its note C7517).
    """
    WAIT: gl.constexpr = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def initial_sums(values, factor, FOLD: gl.constexpr, S_L: gl.constexpr):
    """Return the initial accumulator of S^T or dP^T: a value for each query; zeros, which are not used, if not FOLD."""
    BLOCK_M: gl.constexpr = values.shape[0]
    # [64, BLOCK_M]
    zeros = gl.zeros([64, BLOCK_M], gl.float32, S_L)
    if FOLD:
        return zeros + (values.load(gl.SliceLayout(0, S_L)) * factor)[None, :]
    else:
        return zeros


# ---- what a step asks for


@gluon.jit
def count_heads(sizes, OPTIONS: gl.constexpr):
    """Return how many query heads read a tile of keys."""
    if OPTIONS.GROUPED:
        return sizes.group_size
    else:
        return 1


@gluon.jit
def first_own_key(tile, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the first of the 64 keys whose scores a warpgroup computes: its half of 128, or all."""
    return tile.n0 + W * (OPTIONS.BLOCK_N - 64)


@gluon.jit
def head_of(inputs, tile, member, sizes, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return what a warpgroup needs to know of the query head number `member` of a tile."""
    row = head_row(tile, member, count_heads(sizes, OPTIONS), sizes, OPTIONS)
    walk = walk_of_head(tile, member, inputs.tensors, sizes, OPTIONS)
    key = first_own_key(tile, W, OPTIONS)
    biases = biases_of_head(inputs.biases, tile, member, key, sizes, OPTIONS, S_L)
    return Head(row=row, walk=walk, biases=biases)


@gluon.jit
def pairs_of_block(inputs, head, m, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return the `Pairs` of queries from m on."""
    mask = mask_of_block(inputs.biases, head.biases, m, OPTIONS, S_L)
    return Pairs(mask=mask, kept=kept_pairs(inputs.biases, head.biases, m, OPTIONS))


# ---- probabilities


@gluon.jit
def probabilities(s, inputs, head, place, m, pairs, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return exp(S^T - lse) of the queries in slot `place`; pairs that do not see each other are not masked."""
    # [KEYS, BLOCK_M]
    x = s * inputs.scaling.scale_log2
    if not OPTIONS.FOLD_LSE:
        x = x - inputs.memory.lse.index(place).load(gl.SliceLayout(0, S_L))[None, :]
    return gl.exp2(bias_exponents(x, m, pairs.mask, head.biases, OPTIONS, S_L))


@gluon.jit
def mask_pairs(p, m, key, sequence, pairs, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Return p of queries m .. and of this warpgroup's keys `key` .., and 0 for pairs that a boolean mask hides, and if
    MASK for those that do not see each other, whatever it was."""
    # [KEYS, BLOCK_M]
    if MASK:
        p = keep_seen(p, m, key, sequence, OPTIONS, S_L)
    return hide_pairs(p, pairs.mask, OPTIONS, S_L)


@gluon.jit
def weigh(
    s, inputs, tile, head, place, m, pairs, W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr,
    S_L: gl.constexpr, P_L: gl.constexpr,
):  # fmt: skip
    """Return P^T of the queries m .., in slot `place`, and of this warpgroup's keys, as an operand, and what dP^T is
    multiplied with: P^T, under a soft cap times its derivative. s: S^T."""
    key = first_own_key(tile, W, OPTIONS)
    # [KEYS, BLOCK_M]
    if OPTIONS.SOFTCAP:
        s = tanh(s * inputs.scaling.cap_in)
    p_all = probabilities(s, inputs, head, place, m, pairs, OPTIONS, S_L)
    p = mask_pairs(p_all, m, key, tile.sequence, pairs, MASK, OPTIONS, S_L)
    p_low = gl.convert_layout(drop_pairs(p, pairs.kept, OPTIONS, S_L).to(inputs.memory.k.dtype), P_L)
    if OPTIONS.SOFTCAP:  # masked after the product: a hidden key may leave a derivative of NaN
        p = mask_pairs(p_all * (1.0 - s * s), m, key, tile.sequence, pairs, MASK, OPTIONS, S_L)
    return p_low, p


# ---- the step


@gluon.jit
def issue_dq(all_k, ds, W: gl.constexpr, OPTIONS: gl.constexpr, DQ_L: gl.constexpr):
    """Issue this warpgroup's half of dQ of a block of queries. all_k: K, transposed in registers if DEFER."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    if OPTIONS.DEFER:  # dQ^T = K^T (registers) dS^T
        # [head_dim, BLOCK_M / 2]
        half = ds.slice(W * (BLOCK_M // 2), BLOCK_M // 2, dim=1)
        zeros = gl.zeros([all_k.shape[0], BLOCK_M // 2], gl.float32, DQ_L)
        return warpgroup_mma(all_k, half, zeros, use_acc=False, is_async=True)
    else:  # dQ = dS K
        TAIL: gl.constexpr = OPTIONS.TAIL
        COLUMNS: gl.constexpr = (64, TAIL)[W] if TAIL else all_k.shape[1] // 2
        # [BLOCK_M, head_dim / 2], or with TAIL a panel
        half = all_k.slice(W * (64 if TAIL else COLUMNS), COLUMNS, dim=1)
        zeros = gl.zeros([BLOCK_M, COLUMNS], gl.float32, DQ_L)
        return warpgroup_mma(ds.permute((1, 0)), half, zeros, use_acc=False, is_async=True)


@gluon.jit
def slot_before(ds):
    """Return the slot of dS of the step before."""
    return Slot(place=1 - ds.place, parity=ds.parity ^ (1 - ds.place))


@gluon.jit
def await_deferred(memory, ds, later, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait for dS of the step before, if there was one."""
    if OPTIONS.NAMED_EXCHANGE:
        if later:
            await_ds(memory, slot_before(ds), W, OPTIONS)
    else:
        before = slot_before(ds)
        mbarrier.wait(memory.exchanged.index(before.place), before.parity, pred=later)


@gluon.jit
def step(
    inputs, operands, tile, head, place, state, W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Compute the block of queries at a place of the walk, and with DEFER dQ of the block before it. Return the new
    state."""
    memory, walk = inputs.memory, head.walk
    S_L: gl.constexpr = LAYOUTS.scores
    FOLD_LSE: gl.constexpr = OPTIONS.FOLD_LSE
    FOLD_DELTA: gl.constexpr = OPTIONS.FOLD_DELTA
    dtype: gl.constexpr = memory.k.dtype
    slot, ds_slot = state.slot, state.ds
    if MASK:
        m = block_at(walk, place, OPTIONS)
    else:
        m = block_at(walk, rotate(walk, place, tile.n0, OPTIONS), OPTIONS)
    before = rotate(walk, place - OPTIONS.BLOCK_M, tile.n0, OPTIONS)  # of an order that is not fixed
    later = place > walk.first
    # [KEYS, BLOCK_M]
    mbarrier.wait(memory.q_full.index(slot.place), slot.parity)
    pairs = pairs_of_block(inputs, head, m, OPTIONS, S_L)
    s_acc = initial_sums(memory.lse.index(slot.place), -1.0 / inputs.scaling.scale_log2, FOLD_LSE, S_L)
    q = memory.q.index(slot.place)
    s_t = warpgroup_mma(operands.k, q.permute((1, 0)), s_acc, use_acc=FOLD_LSE, is_async=True)
    mbarrier.wait(memory.do_full.index(slot.place), slot.parity)
    LATE: gl.constexpr = OPTIONS.SOFTCAP  # a soft cap takes the registers that dP would wait in
    if not LATE:
        dp_acc = initial_sums(memory.delta.index(slot.place), -1.0, FOLD_DELTA, S_L)
        dp_t = warpgroup_mma(
            operands.v, memory.do.index(slot.place).permute((1, 0)), dp_acc, use_acc=FOLD_DELTA, is_async=True
        )
    if OPTIONS.DEFER:
        await_deferred(memory, ds_slot, later, W, OPTIONS)
        # of the first step: thrown away
        dq_t = issue_dq(operands.all_k, memory.ds.index(1 - ds_slot.place), W, OPTIONS, LAYOUTS.dq)
        s = warpgroup_mma_wait(1 if LATE else 2, deps=(s_t,))
    else:
        s = warpgroup_mma_wait(0 if LATE else 1, deps=(s_t,))
    # as `weigh`, whose call would change what ptxas spills
    if LATE:
        s = tanh(s * inputs.scaling.cap_in)
    p_all = probabilities(s, inputs, head, slot.place, m, pairs, OPTIONS, S_L)
    key = first_own_key(tile, W, OPTIONS)
    p = mask_pairs(p_all, m, key, tile.sequence, pairs, MASK, OPTIONS, S_L)
    p_low = gl.convert_layout(drop_pairs(p, pairs.kept, OPTIONS, S_L).to(dtype), LAYOUTS.p)
    if LATE:  # masked after the product: a hidden key may leave a derivative of NaN
        p = mask_pairs(p_all * (1.0 - s * s), m, key, tile.sequence, pairs, MASK, OPTIONS, S_L)
        dp_acc = initial_sums(memory.delta.index(slot.place), -1.0, FOLD_DELTA, S_L)
        dp_t = warpgroup_mma(
            operands.v, memory.do.index(slot.place).permute((1, 0)), dp_acc, use_acc=FOLD_DELTA, is_async=True
        )
    # [KEYS, head_dim]
    dv_t = warpgroup_mma(p_low, memory.do.index(slot.place), state.dv[0], is_async=True)
    if OPTIONS.DEFER:
        dp, dq = warpgroup_mma_wait(1, deps=(dp_t, dq_t))
    else:
        dp = warpgroup_mma_wait(1, deps=(dp_t,))
    # [KEYS, BLOCK_M]
    if OPTIONS.DROPOUT:
        slopes = -memory.delta.index(slot.place).load(gl.SliceLayout(0, S_L))
        dp = choose_slopes(dp, pairs.kept, slopes, OPTIONS, S_L)
    if FOLD_DELTA:
        ds = (p * dp).to(dtype)
    else:
        ds = (p * (dp - memory.delta.index(slot.place).load(gl.SliceLayout(0, S_L))[None, :])).to(dtype)
    memory.ds.index(ds_slot.place).slice(W * 64, 64, dim=0).store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, LAYOUTS.p)
    send_ds(memory, ds_slot.place, W, OPTIONS)
    # [KEYS, head_dim], and a half of [BLOCK_M, head_dim]
    if OPTIONS.DEFER:
        dk_t = warpgroup_mma(ds_low, q, state.dk[0], is_async=True)
        if later:
            give_dq(dq, inputs, head.row + before, slot_before(ds_slot), W, OPTIONS)
        dv, dk = warpgroup_mma_wait(0, deps=(dv_t, dk_t))
    else:
        await_ds(memory, ds_slot, W, OPTIONS)
        dq_t = issue_dq(operands.all_k, memory.ds.index(ds_slot.place), W, OPTIONS, LAYOUTS.dq)
        dk_t = warpgroup_mma(ds_low, q, state.dk[0], is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(dv_t, dq_t))
        give_dq(dq, inputs, head.row + m, ds_slot, W, OPTIONS)
        dk = warpgroup_mma_wait(0, deps=(dk_t,))
    release(memory, slot.place, OPTIONS)
    return State(dk=(dk,), dv=(dv,), slot=next_slot(slot, OPTIONS.STAGES), ds=next_slot(ds_slot, 2))


@gluon.jit
def give_last_dq(inputs, operands, tile, head, state, W: gl.constexpr, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Compute dQ of the last block of queries of a walk (DEFER), and give it away."""
    await_ds(inputs.memory, slot_before(state.ds), W, OPTIONS)
    dq_t = issue_dq(operands.all_k, inputs.memory.ds.index(1 - state.ds.place), W, OPTIONS, LAYOUTS.dq)
    dq = warpgroup_mma_wait(0, deps=(dq_t,))
    last = rotate(head.walk, head.walk.end - OPTIONS.BLOCK_M, tile.n0, OPTIONS)
    give_dq(dq, inputs, head.row + last, slot_before(state.ds), W, OPTIONS)
