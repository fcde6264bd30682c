"""A walk of the Hopper attention backward whose scores run ahead, in Gluon: the next S^T is issued while dK runs.

For tiles of 128 columns. What makes it fast, and is easily lost when the code changes:

1. The tensor cores never run dry between two steps. Without this a step begins with an empty queue: a wait for dK, then
   statistics, addresses and a barrier ahead of its first product.
2. S^T is complete at the first wait of the next step, whose count is 0. ptxas runs wgmma one by one (C7514) where a
   step reads a product of the step before after a wait that leaves another one in flight.
3. The pass before leaves statistics as the products begin with them (`lse_factor` of `prepare_kernel`): no arithmetic
   between their loads and the product.
4. Addresses of K as an operand are computed in every step (`recompute_address`). LLVM knows them to be the same in all
   and computes them ahead of the loop, where they spill.
5. Warps of their own add dQ (adders.py): the warpgroups wait for memory alone.
6. Where walks are short, V of the next tile is copied during the last dQ and dK of this one, K once they are complete.
   Each tile arrives once where the warp that copies waits for V (`give_values`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from blocktune.kernels.hopper.backward.adders import hand_over
from blocktune.kernels.hopper.backward.arguments import Pairs
from blocktune.kernels.hopper.backward.barriers import await_ds, give_values, release, send_ds
from blocktune.kernels.hopper.backward.bounds import (
    begins_with_masks,
    block_at,
    count_listed,
    ends_with_masks,
    parts_of_walk,
    place_walk,
    rotate,
)
from blocktune.kernels.hopper.backward.steps import (
    State,
    head_of,
    issue_dq,
    pairs_of_block,
    weigh,
)
from blocktune.kernels.hopper.backward.tiles import add_diagonal
from blocktune.kernels.hopper.backward.wide.steps import hidden_zero
from blocktune.kernels.hopper.biases.of_keys import choose_slopes, mask_of_block
from blocktune.kernels.hopper.common.device_functions import in_register_order, reinterpret
from blocktune.kernels.hopper.common.slots import next_slot
from blocktune.kernels.hopper.common.tailed_columns import (
    add_to_gradient,
    await_gradient,
    await_gradient_and,
    count_panels,
    multiply_rows,
)


class Ahead(NamedTuple):
    """What runs ahead of a step: its S^T; and how many steps of the tile are left, the step included."""

    scores: Any
    left: Any


@gluon.jit
def recompute_address(tile):
    """Return a tile of shared memory, whose address is computed where it stands (`hidden_zero`)."""
    return reinterpret(tile, tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout).index(hidden_zero())


@gluon.jit
def spread(values, S_L: gl.constexpr):
    """Return the initial accumulator of S^T or dP^T: a value for each query."""
    # [64, BLOCK_M]
    wide, _ = gl.broadcast(values[None, :], gl.zeros([64, values.shape[0]], gl.float32, S_L))
    return wide


@gluon.jit
def issue_scores(memory, slot, ready, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Issue S^T of the queries in a slot, which are waited for if `ready`."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    mbarrier.wait(memory.q_full.index(slot.place), slot.parity, pred=ready)
    # [64, BLOCK_M]
    if OPTIONS.FOLD_LSE:
        start = spread(memory.lse.index(slot.place).load(gl.SliceLayout(0, S_L)), S_L)
    else:
        start = gl.zeros([64, BLOCK_M], gl.float32, S_L)
    keys = recompute_address(memory.k).slice(W * 64, 64, dim=0)
    return multiply_rows(keys, memory.q.index(slot.place), start, OPTIONS.FOLD_LSE, OPTIONS)


@gluon.jit
def first_slope(memory, place, S_L: gl.constexpr):
    """Return what dP^T of the queries in a slot begins with."""
    return memory.delta.index(place).load(gl.SliceLayout(0, S_L))


@gluon.jit
def issue_slopes_upon(start, memory, place, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Issue dP^T of the queries in a slot, on top of `start`."""
    values = memory.v.slice(W * 64, 64, dim=0)
    return multiply_rows(values, memory.do.index(place), spread(start, S_L), True, OPTIONS)


@gluon.jit
def step_ahead(
    inputs, tile, head, place, ahead, state, mask, W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """Compute the block of queries at a place of the walk, whose S^T is on its way. mask: what was loaded for it with
    MASK_AHEAD. Return what runs ahead of the next step, the new state and mask; after the last step S^T is that of
    whatever lies in the slot, to be thrown away."""
    memory, walk = inputs.memory, head.walk
    S_L: gl.constexpr = LAYOUTS.scores
    PANELS: gl.constexpr = count_panels(OPTIONS)
    slot, ds_slot = state.slot, state.ds
    if MASK:
        m = block_at(walk, place, OPTIONS)
    else:
        m = block_at(walk, rotate(walk, place, tile.n0, OPTIONS), OPTIONS)
    m_after = block_after(walk, place, tile.n0, OPTIONS)
    following = next_slot(slot, OPTIONS.STAGES)
    # [KEYS, BLOCK_M]
    if OPTIONS.MASK_AHEAD:
        pairs = Pairs(mask=mask, kept=0)
    else:
        pairs = pairs_of_block(inputs, head, m, OPTIONS, S_L)
    mbarrier.wait(memory.do_full.index(slot.place), slot.parity)
    if OPTIONS.SOFTCAP:  # a soft cap takes the registers that dP would wait in
        s = warpgroup_mma_wait(0, deps=(ahead.scores,))
        p_low, p = weigh(s, inputs, tile, head, slot.place, m, pairs, W, MASK, OPTIONS, S_L, LAYOUTS.p)
        dp_t = issue_slopes_upon(first_slope(memory, slot.place, S_L), memory, slot.place, W, OPTIONS, S_L)
    else:
        start = first_slope(memory, slot.place, S_L)
        s = warpgroup_mma_wait(0, deps=(ahead.scores,))
        dp_t = issue_slopes_upon(start, memory, slot.place, W, OPTIONS, S_L)
        p_low, p = weigh(s, inputs, tile, head, slot.place, m, pairs, W, MASK, OPTIONS, S_L, LAYOUTS.p)
    # [KEYS, head_dim]
    dv_t = add_to_gradient(p_low, memory.do.index(slot.place), state.dv, OPTIONS, LAYOUTS)
    dp = warpgroup_mma_wait(PANELS, deps=(dp_t,))
    if OPTIONS.SHORT:
        give_values(ahead.left)
    # [KEYS, BLOCK_M]
    if OPTIONS.DROPOUT:
        dp = choose_slopes(dp, pairs.kept, first_slope(memory, slot.place, S_L), OPTIONS, S_L)
    ds = (p * dp).to(memory.k.dtype)
    memory.ds.index(ds_slot.place).slice(W * 64, 64, dim=0).store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, LAYOUTS.p)
    send_ds(memory, ds_slot.place, W, OPTIONS)
    await_ds(memory, ds_slot, W, OPTIONS)
    # [KEYS, head_dim], and a half of [BLOCK_M, head_dim]
    dq_t = issue_dq(recompute_address(memory.k), memory.ds.index(ds_slot.place), W, OPTIONS, LAYOUTS.dq)
    dk_t = add_to_gradient(ds_low, memory.q.index(slot.place), state.dk, OPTIONS, LAYOUTS)
    dv, dq = await_gradient_and(dv_t, dq_t, PANELS)
    hand_over(in_register_order(dq), memory, ds_slot, W, OPTIONS)
    if OPTIONS.MASK_AHEAD:  # into the registers that dQ had
        mask = mask_of_block(inputs.biases, head.biases, m_after, OPTIONS, S_L)
    s_t = issue_scores(memory, following, ahead.left > 1, W, OPTIONS, S_L)
    dk = await_gradient(dk_t, PANELS)
    release(memory, slot.place, OPTIONS)
    state = State(dk, dv, following, next_slot(ds_slot, 2))
    return Ahead(s_t, ahead.left - 1), state, mask


@gluon.jit
def block_after(walk, place, n0, OPTIONS: gl.constexpr):
    """Return the block of queries after the one at a place of a walk with MASK_AHEAD; of the last one itself."""
    return rotate(walk, gl.minimum(place + OPTIONS.BLOCK_M, walk.end - OPTIONS.BLOCK_M), n0, OPTIONS)


@gluon.jit
def head_ahead(
    inputs, tile, member, sizes, ahead, state, W: gl.constexpr, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr
):  # fmt: skip
    """Take the steps of the query head number `member` (`walk_head`)."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    head = head_of(inputs, tile, member, sizes, W, OPTIONS, LAYOUTS.scores)
    walk = place_walk(head.walk, OPTIONS)
    mask = 0
    if OPTIONS.MASK_AHEAD:
        m = rotate(walk, walk.first, tile.n0, OPTIONS)
        mask = mask_of_block(inputs.biases, head.biases, m, OPTIONS, LAYOUTS.scores)
    masked, whole, stop = walk.first, walk.low, walk.high
    for _ in range(parts_of_walk(OPTIONS)):
        if begins_with_masks(OPTIONS):
            for place in range(masked, whole, BLOCK_M):
                ahead, state, mask = step_ahead(
                    inputs, tile, head, place, ahead, state, mask, W, True, OPTIONS, LAYOUTS
                )  # fmt: skip
        for place in range(whole, stop, BLOCK_M):
            ahead, state, mask = step_ahead(
                inputs, tile, head, place, ahead, state, mask, W, False, OPTIONS, LAYOUTS
            )  # fmt: skip
        masked, whole, stop = walk.high, walk.end, walk.end
    if ends_with_masks(OPTIONS):
        for place in range(walk.high, walk.end, BLOCK_M):
            ahead, state, mask = step_ahead(
                inputs, tile, head, place, ahead, state, mask, W, True, OPTIONS, LAYOUTS
            )  # fmt: skip
    return ahead, state


@gluon.jit
def walk_ahead(inputs, tile, sizes, state, W: gl.constexpr, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Take the steps of all heads that read a tile of keys, one head after the other. The next head's first scores are
    issued as those of any next step are. Return the new state."""
    memory, tile = inputs.memory, add_diagonal(tile, OPTIONS)
    left = (tile.walk.end - tile.walk.first) // OPTIONS.BLOCK_M
    if OPTIONS.LISTED:
        left = count_listed(tile, inputs.tensors, sizes, OPTIONS)
    elif OPTIONS.GROUPED:
        left *= sizes.group_size
    s_t = issue_scores(memory, state.slot, True, W, OPTIONS, LAYOUTS.scores)
    mbarrier.wait(memory.do_full.index(state.slot.place), state.slot.parity)
    tma.store_wait(0)  # dK and dV of the tile before leave from where dQ does
    for member in range(sizes.group_size if OPTIONS.GROUPED else 1):
        ahead, state = head_ahead(inputs, tile, member, sizes, Ahead(s_t, left), state, W, OPTIONS, LAYOUTS)
        s_t, left = ahead
    warpgroup_mma_wait(0, deps=(s_t,))
    return state
