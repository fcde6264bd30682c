"""A walk of the Hopper attention backward whose scores run ahead, in Gluon: the next S^T is issued while dK runs.

For a width of 128. What makes it fast, and is easily lost when the code changes:

1. The tensor cores never run dry between two steps. Without this a step begins with an empty queue: a wait for dK, then
   statistics, addresses and a barrier ahead of its first product.
2. S^T is complete at the first wait of the next step, whose count is 0. ptxas runs wgmma one by one (C7514) where a
   step reads a product of the step before after a wait that leaves another one in flight.
3. The pass before leaves statistics as the products begin with them (`lse_factor` of `prepare_kernel`): no arithmetic
   between their loads and the product.
4. Addresses of K as an operand are computed in every step (`anew`). LLVM knows them to be the same in all and computes
   them ahead of the loop, where they spill.
5. Warps of their own add dQ (adders.py): the warpgroups wait for memory alone.
6. Where walks are short, V of the next tile is copied during the last dQ and dK of this one, K once they are complete.
   Hardware's barrier 15 says that V has been read; each tile arrives there once.
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

from blocktune.kernels.hopper.backward.adders import hand_over
from blocktune.kernels.hopper.backward.arguments import Steps
from blocktune.kernels.hopper.backward.bounds import block_at, count_listed, places_of, rotated, walk_of
from blocktune.kernels.hopper.backward.form import (
    begins_with_masks,
    ends_with_masks,
    is_diagonal,
    parts_of_walk,
)
from blocktune.kernels.hopper.backward.steps import (
    asked_of_pairs,
    head_biases,
    issue_dq,
    mask_of_pairs,
    release,
    send_ds,
    wait_ds,
    weigh,
)
from blocktune.kernels.hopper.backward.wide.steps import hidden_zero
from blocktune.kernels.hopper.biases.of_keys import slopes_where_kept
from blocktune.kernels.hopper.common.device_functions import advance, in_register_order, reinterpret
from blocktune.kernels.hopper.common.named_barriers import bar_sync


@gluon.jit
def anew(tile):
    """A tile of shared memory, whose address is computed where it stands (`hidden_zero`)."""
    return reinterpret(tile, tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout).index(hidden_zero())


@gluon.jit
def spread(values, KEYS: gl.constexpr, S_L: gl.constexpr):
    """The initial accumulator of S^T or dP^T: a value for each query."""
    # [KEYS, BLOCK_M]
    wide, _ = gl.broadcast(values[None, :], gl.zeros([KEYS, values.shape[0]], gl.float32, S_L))
    return wide


@gluon.jit
def issue_scores(memory, slot, phase, ready, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """S^T of the queries in a slot, which are waited for if `ready`; not waited for itself."""
    KEYS: gl.constexpr = memory.k.shape[0] // 2
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    mbarrier.wait(memory.q_full.index(slot), phase, pred=ready)
    # [KEYS, BLOCK_M]
    if OPTIONS.FOLD_LSE:
        start = spread(memory.lse.index(slot).load(gl.SliceLayout(0, S_L)), KEYS, S_L)
    else:
        start = gl.zeros([KEYS, BLOCK_M], gl.float32, S_L)
    keys = anew(memory.k).slice(W * KEYS, KEYS, dim=0)
    queries = memory.q.index(slot).permute((1, 0))
    return warpgroup_mma(keys, queries, start, use_acc=OPTIONS.FOLD_LSE, is_async=True)


@gluon.constexpr_function
def give_values_asm():
    return "{ .reg .pred p; setp.eq.s32 p, $1, 1; @p bar.arrive 15, 288; mov.b32 $0, $1; }"


@gluon.jit
def give_values(left):
    """Tells the warp that copies that V has been read for the last time, in the last step of a tile."""
    ASM: gl.constexpr = give_values_asm()
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [left], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_values():
    """Until both warpgroups have given V."""
    bar_sync(15, 288)


@gluon.jit
def first_slope(memory, slot, S_L: gl.constexpr):
    """What dP^T of the queries in a slot begins with."""
    return memory.delta.index(slot).load(gl.SliceLayout(0, S_L))


@gluon.jit
def issue_slopes(memory, slot, start, W: gl.constexpr, S_L: gl.constexpr):
    """dP^T of the queries in a slot, on top of `start`; not waited for."""
    KEYS: gl.constexpr = memory.k.shape[0] // 2
    values = memory.v.slice(W * KEYS, KEYS, dim=0)
    return warpgroup_mma(values, memory.do.index(slot).permute((1, 0)), spread(start, KEYS, S_L), is_async=True)


@gluon.jit
def step_ahead(
    steps, s_t, loaded, left, dk, dv, m, following, n0, bounds, slot, phase, b, b_phase,
    W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr,
    DQ_L: gl.constexpr,
):  # fmt: skip
    """One block of queries from m on, whose S^T is on its way as s_t. b, b_phase: the buffer of dS.

    left: steps of the tile, this one included. Returns the next step's S^T; after the last one that of whatever lies
    in the slot, to be thrown away. loaded: of the mask, where the step has MASK_AHEAD; returned for the queries
    from `following` on.
    """
    memory = steps.memory
    KEYS: gl.constexpr = memory.k.shape[0] // 2
    P_L: gl.constexpr = gl.DotOperandLayout(0, KV_L, 2)
    next_slot, next_phase = advance(slot, phase, OPTIONS.STAGES)
    ASK_AHEAD: gl.constexpr = OPTIONS.MASK_AHEAD
    # [KEYS, BLOCK_M]
    if ASK_AHEAD:
        asked = loaded, 0
    else:
        asked = asked_of_pairs(steps, m, OPTIONS, S_L)
    mbarrier.wait(memory.do_full.index(slot), phase)
    if OPTIONS.SOFTCAP:  # a soft cap takes the registers that dP would wait in
        s = warpgroup_mma_wait(0, deps=(s_t,))
        p_low, p = weigh(s, steps, slot, m, n0 + W * KEYS, bounds, asked, MASK, OPTIONS, S_L, P_L)
        dp_t = issue_slopes(memory, slot, first_slope(memory, slot, S_L), W, S_L)
    else:
        start = first_slope(memory, slot, S_L)
        s = warpgroup_mma_wait(0, deps=(s_t,))
        dp_t = issue_slopes(memory, slot, start, W, S_L)
        p_low, p = weigh(s, steps, slot, m, n0 + W * KEYS, bounds, asked, MASK, OPTIONS, S_L, P_L)
    # [KEYS, head_dim]
    dv_t = warpgroup_mma(p_low, memory.do.index(slot), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp_t,))
    if OPTIONS.SHORT:
        give_values(left)
    # [KEYS, BLOCK_M]
    if OPTIONS.DROPOUT:
        dp = slopes_where_kept(dp, asked[1], first_slope(memory, slot, S_L), OPTIONS, S_L)
    ds = (p * dp).to(memory.k.dtype)
    memory.ds.index(b).slice(W * KEYS, KEYS, dim=0).store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, P_L)
    send_ds(memory.ds_full, b, W, OPTIONS)
    wait_ds(memory.ds_full, b, b_phase, W, OPTIONS)
    # [KEYS, head_dim], and a half of [BLOCK_M, head_dim]
    dq_t = issue_dq(None, anew(memory.k), memory.ds.index(b), W, False, DQ_L)
    dk_t = warpgroup_mma(ds_low, memory.q.index(slot), dk, is_async=True)
    dv, dq = warpgroup_mma_wait(1, deps=(dv_t, dq_t))
    hand_over(in_register_order(dq), memory, b, b_phase, W, AWAIT=False)
    if ASK_AHEAD:  # into the registers that dQ had
        loaded = mask_of_pairs(steps, following, OPTIONS, S_L)
    s_t = issue_scores(memory, next_slot, next_phase, left > 1, W, OPTIONS, S_L)
    dk = warpgroup_mma_wait(1, deps=(dk_t,))
    release(memory.empty, slot, OPTIONS)
    b, b_phase = advance(b, b_phase, 2)
    return s_t, loaded, left - 1, dk, dv, next_slot, next_phase, b, b_phase


@gluon.jit
def next_block(place, n0, low, high, end, BLOCK_M: gl.constexpr, OPTIONS: gl.constexpr):
    """The block of queries after the one at a place of a walk that has MASK_AHEAD; of the last one itself."""
    return rotated(gl.minimum(place + BLOCK_M, end - BLOCK_M), n0, low, high, OPTIONS)


@gluon.jit
def head_ahead(
    steps, s_t, left, dk, dv, n0, first, low, high, end, back, entries, bounds, slot, phase, b, b_phase,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of one head that see the keys from n0 on (`query_head`)."""
    BLOCK_M: gl.constexpr = steps.memory.q.shape[1]
    low, high = places_of(first, low, high, end, back, OPTIONS)
    loaded = 0
    if OPTIONS.MASK_AHEAD:
        loaded = mask_of_pairs(steps, rotated(first, n0, low, high, OPTIONS), OPTIONS, S_L)
    masked, whole, stop = first, low, high
    for _ in range(parts_of_walk(OPTIONS)):
        if begins_with_masks(OPTIONS):
            for place in range(masked, whole, BLOCK_M):
                m = block_at(place, first, end, back, BLOCK_M, OPTIONS, entries)
                following = next_block(place, n0, low, high, end, BLOCK_M, OPTIONS)
                s_t, loaded, left, dk, dv, slot, phase, b, b_phase = step_ahead(
                    steps, s_t, loaded, left, dk, dv, m, following, n0, bounds, slot, phase, b, b_phase,
                    W, True, OPTIONS, S_L, KV_L, DQ_L,
                )  # fmt: skip
        for place in range(whole, stop, BLOCK_M):
            at = rotated(place, n0, low, high, OPTIONS)
            m = block_at(at, first, end, back, BLOCK_M, OPTIONS, entries)
            following = next_block(place, n0, low, high, end, BLOCK_M, OPTIONS)
            s_t, loaded, left, dk, dv, slot, phase, b, b_phase = step_ahead(
                steps, s_t, loaded, left, dk, dv, m, following, n0, bounds, slot, phase, b, b_phase,
                W, False, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
        masked, whole, stop = high, end, end
    if ends_with_masks(OPTIONS):
        for place in range(high, end, BLOCK_M):
            m = block_at(place, first, end, back, BLOCK_M, OPTIONS, entries)
            following = next_block(place, n0, low, high, end, BLOCK_M, OPTIONS)
            s_t, loaded, left, dk, dv, slot, phase, b, b_phase = step_ahead(
                steps, s_t, loaded, left, dk, dv, m, following, n0, bounds, slot, phase, b, b_phase,
                W, True, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
    return s_t, left, dk, dv, slot, phase, b, b_phase


@gluon.jit
def walk_ahead(
    steps, dk, dv, n, batch_head, sizes, first, low, high, end, back, bounds, slot, phase, b, b_phase,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries that see the tile n of keys, of one head after the other. The next head's first scores are
    issued as those of any next step are."""
    memory = steps.memory
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    n0 = n * BLOCK_N
    if is_diagonal(OPTIONS):
        first = n0 + 0
        low = n0 + BLOCK_N
    left = (end - first) // BLOCK_M
    if OPTIONS.LISTED:
        left = count_listed(n, batch_head, sizes, BLOCK_M)
    elif OPTIONS.GROUPED:
        left *= sizes.group_size
    s_t = issue_scores(memory, slot, phase, True, W, OPTIONS, S_L)
    mbarrier.wait(memory.do_full.index(slot), phase)
    tma.store_wait(0)  # dK and dV of the tile before leave from where dQ does
    for member in range(sizes.group_size if OPTIONS.GROUPED else 1):
        entries, low, high, end = walk_of(n, batch_head, member, low, high, end, sizes, BLOCK_M, OPTIONS)
        own = Steps(
            dq_desc=steps.dq_desc,
            dq_sums=steps.dq_sums,
            memory=memory,
            scale_log2=steps.scale_log2,
            cap_in=steps.cap_in,
            biases=steps.biases,
            head=head_biases(steps, batch_head, member, n0 + W * (BLOCK_N // 2), bounds, sizes, OPTIONS, S_L),
        )
        s_t, left, dk, dv, slot, phase, b, b_phase = head_ahead(
            own, s_t, left, dk, dv, n0, first, low, high, end, back, entries, bounds, slot, phase, b, b_phase,
            W, OPTIONS, S_L, KV_L, DQ_L,
        )  # fmt: skip
    warpgroup_mma_wait(0, deps=(s_t,))
    return dk, dv, slot, phase, b, b_phase
