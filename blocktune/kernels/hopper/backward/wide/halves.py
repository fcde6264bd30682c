"""The Hopper attention backward for a head_dim up to 192 and head_dim_v up to 128, in Gluon: 64 of 128 keys each.

dK and dV of 64 keys take 160 registers of a warpgroup, which leaves room for one product of 64 keys and 64 queries at a
time, and half of one. Next to tiles of 64 keys (wide/warps.py), each key adds half as much to the sums of dq, P stays
in registers, and a step reads half as much of Q and dO. Heads are panels of 64 columns. dQ of a step has three, one and
a half for each warpgroup.

What makes it fast, and is easily lost when the code changes:

1. dQ of a step is computed in the next one. There is room for dS of two steps, so that neither warpgroup waits for the
   other one unless that one is a step late: while one computes a softmax, the products of the other run.
2. A step never has more than 48 accumulators next to the gradients. Otherwise ptxas runs the products one by one
   (C7512): half a panel of dQ is in flight with S, a whole one with dV, and dS is computed from 16-bit P, which is
   unpacked after a wait (`pin_pairs`). S of the next step is not issued ahead, which would take 16 registers more.
3. The first step of a tile, which has no dQ of a step before it, computes one all the same and leaves out the addition
   alone: after a longer branch every warp would wait for its warpgroup once more.
4. Q and dO of a step are released together.

Barriers. A warpgroup writes dS of step j + 1 where that of step j - 1 was, which both have read: it has seen the other
one's half of step j, which is written after the products with dS of step j - 1 were complete.
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

from blocktune.kernels.hopper.backward.arguments import Inputs
from blocktune.kernels.hopper.backward.barriers import await_ds, send_ds
from blocktune.kernels.hopper.backward.bounds import begins_with_masks, block_at, ends_with_masks, place_walk
from blocktune.kernels.hopper.backward.steps import (
    first_own_key,
    head_of,
    initial_sums,
    mask_pairs,
    pairs_of_block,
    probabilities,
)
from blocktune.kernels.hopper.backward.tiles import (
    count_key_tiles,
    receive_first,
    rows_of_keys,
    tile_of_keys,
)
from blocktune.kernels.hopper.backward.wide.steps import accumulate, hidden_zero
from blocktune.kernels.hopper.backward.wide.warps import give_gradient
from blocktune.kernels.hopper.common.device_functions import add_out, in_register_order, reinterpret
from blocktune.kernels.hopper.common.slots import Slot, first_slot, next_slot, receive

# mypy: disable-error-code="assignment,var-annotated"


class HalfState(NamedTuple):
    """What a step leaves to the next one: the panels of dK and of dV, the next slot, and where dQ of the step is added,
    negative where there is none."""

    dk: Any
    dv: Any
    slot: Any
    before: Any


@gluon.jit
def product_of_half(a, b, place, acc, W: gl.constexpr, FOLD: gl.constexpr):
    """Issue a b^T over all panels, of this warpgroup's rows of a and b's rows in slot `place`, on top of `acc` if
    FOLD."""
    PANELS: gl.constexpr = a.shape[0]
    start = hidden_zero()
    for panel in gl.static_range(PANELS):
        keys = a.index(start + panel).slice(W * 64, 64, dim=0)
        queries = b.index(place * PANELS + panel).permute((1, 0))
        acc = warpgroup_mma(keys, queries, acc, use_acc=FOLD or panel > 0, is_async=True)
    return acc


@gluon.jit
def issue_part(ds, k_smem, panel: gl.constexpr, begin: gl.constexpr, DQ_L: gl.constexpr):
    """Issue dQ of the columns of a panel from `begin` on, as many as DQ_L has."""
    COLUMNS: gl.constexpr = DQ_L.instr_shape[1]
    # [BLOCK_M, COLUMNS]
    columns = k_smem.index(hidden_zero() + panel).slice(begin, COLUMNS, dim=1)
    zeros = gl.zeros([64, COLUMNS], gl.float32, DQ_L)
    return warpgroup_mma(ds.permute((1, 0)), columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def give_half(dq, inputs, place, W: gl.constexpr):
    """Add half a panel of dQ of 64 queries to the sums from `place` on, once half of what left before is read."""
    # [32, 64]
    x = in_register_order(dq)
    tma.store_wait(1)
    room = inputs.memory.dq.index(W).slice(0, 32, dim=0)
    room.store(x)
    fence_async_shared()
    if place >= 0:
        add_out(inputs.tensors.dq, [place + (2 + W) * 32, 0], room)


@gluon.jit
def give_whole(dq, inputs, place, W: gl.constexpr):
    """Add a whole panel of dQ of 64 queries to the sums from `place` on, by two copies."""
    room = inputs.memory.dq.index(W)
    # [64, 64]
    x = in_register_order(dq)
    tma.store_wait(0)
    room.store(x)
    fence_async_shared()
    if place >= 0:
        for half in gl.static_range(2):
            add_out(inputs.tensors.dq, [place + (4 * W + half) * 32, 0], room.slice(half * 32, 32, dim=0))


@gluon.jit
def pin_pairs(x):
    """Hold 16-bit x, which no instruction uses: it is computed ahead of what follows (`pin`)."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def await_before(inputs, slot, before, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait for dS of the step before the one in a slot, whose dQ is added from `before` on."""
    if before >= 0:
        ds = Slot(place=slot.place ^ 1, parity=slot.parity ^ slot.place ^ 1)
        await_ds(inputs.memory, ds, W, OPTIONS)


@gluon.jit
def issue_half(inputs, place, W: gl.constexpr):
    """Issue dQ of the step before the one in slot `place`: this warpgroup's half of the second panel."""
    HALF_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    return issue_part(inputs.memory.ds.index(place ^ 1), inputs.memory.k, 1, 32 * W, HALF_L)


@gluon.jit
def issue_whole(inputs, place, W: gl.constexpr, S_L: gl.constexpr):
    """Issue dQ of the step before the one in slot `place`: this warpgroup's whole panel."""
    return issue_part(inputs.memory.ds.index(place ^ 1), inputs.memory.k, 2 * W, 0, S_L)


@gluon.jit
def step_of_half(
    inputs, tile, head, m, state, W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr
):  # fmt: skip
    """Compute one block of queries from m on, and dQ of the one before it. Return the new state."""
    memory = inputs.memory
    slot, before = state.slot, state.before
    P_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    # [KEYS, BLOCK_M] and [BLOCK_M, 32]
    pairs = pairs_of_block(inputs, head, m, OPTIONS, S_L)
    mbarrier.wait(memory.q_full.index(slot.place), slot.parity)
    start = initial_sums(memory.lse.index(slot.place), -1.0 / inputs.scaling.scale_log2, OPTIONS.FOLD_LSE, S_L)
    s_t = product_of_half(memory.k, memory.q, slot.place, start, W, OPTIONS.FOLD_LSE)
    await_before(inputs, slot, before, W, OPTIONS)
    half_t = issue_half(inputs, slot.place, W)
    s = warpgroup_mma_wait(1, deps=(s_t,))
    p = probabilities(s, inputs, head, slot.place, m, pairs, OPTIONS, S_L)
    key = first_own_key(tile, W, OPTIONS)
    p = mask_pairs(p, m, key, tile.sequence, pairs, MASK, OPTIONS, S_L).to(memory.k.dtype)
    half = warpgroup_mma_wait(0, deps=(half_t,))
    give_half(half, inputs, before, W)
    mbarrier.wait(memory.do_full.index(slot.place), slot.parity)
    # [BLOCK_M, 64], panels [KEYS, 64]
    whole_t = issue_whole(inputs, slot.place, W, S_L)
    dv_t = accumulate(state.dv, gl.convert_layout(p, P_L), memory.do, slot.place, 2)
    whole = warpgroup_mma_wait(2, deps=(whole_t,))
    give_whole(whole, inputs, before, W)
    # [KEYS, BLOCK_M]
    start = initial_sums(memory.delta.index(slot.place), -1.0, OPTIONS.FOLD_DELTA, S_L)
    dp_t = product_of_half(memory.v, memory.do, slot.place, start, W, OPTIONS.FOLD_DELTA)
    v0, v1, dp = warpgroup_mma_wait(0, deps=(dv_t[0], dv_t[1], dp_t))
    p = pin_pairs(p).to(gl.float32)
    if not OPTIONS.FOLD_DELTA:
        dp = dp - memory.delta.index(slot.place).load(gl.SliceLayout(0, S_L))[None, :]
    ds = (p * dp).to(memory.k.dtype)
    memory.ds.index(slot.place).slice(W * 64, 64, dim=0).store(ds)
    fence_async_shared()
    send_ds(memory, slot.place, W, OPTIONS)
    # panels [KEYS, 64]
    dk_t = accumulate(state.dk, gl.convert_layout(ds, P_L), memory.q, slot.place, 3)
    dk = warpgroup_mma_wait(0, deps=dk_t)
    mbarrier.arrive(memory.q_empty.index(slot.place), count=1)
    return HalfState(dk, (v0, v1), next_slot(slot, OPTIONS.STAGES), (head.row + m) * OPTIONS.PANELS)


@gluon.jit
def give_last(inputs, slot, before, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Add dQ of a tile's last block of queries from `before` on. slot: of the step that comes next."""
    await_before(inputs, slot, before, W, OPTIONS)
    half_t = issue_half(inputs, slot.place, W)
    whole_t = issue_whole(inputs, slot.place, W, S_L)
    half = warpgroup_mma_wait(1, deps=(half_t,))
    give_half(half, inputs, before, W)
    whole = warpgroup_mma_wait(0, deps=(whole_t,))
    give_whole(whole, inputs, before, W)


@gluon.jit
def walk_half_head(inputs, tile, head, state, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Take the steps of one query head, and return the new state."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    walk = place_walk(head.walk, OPTIONS)
    if begins_with_masks(OPTIONS):
        for place in range(walk.first, walk.low, BLOCK_M):
            state = step_of_half(inputs, tile, head, block_at(walk, place, OPTIONS), state, W, True, OPTIONS, S_L)
    for place in range(walk.low, walk.high, BLOCK_M):
        state = step_of_half(inputs, tile, head, block_at(walk, place, OPTIONS), state, W, False, OPTIONS, S_L)
    if ends_with_masks(OPTIONS):
        for place in range(walk.high, walk.end, BLOCK_M):
            state = step_of_half(inputs, tile, head, block_at(walk, place, OPTIONS), state, W, True, OPTIONS, S_L)
    return state


@gluon.jit
def consumer_of_half(tensors, memory, scaling, biases, sizes, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute dK and dV of keys 64 W .. 64 W + 63 of every tile of this block, and a half of the tile's part of dQ."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    # [2, KEYS, 64]
    staging = reinterpret(memory.dq.index(W), memory.k.dtype, [2, 64, 64], GRADIENT_L)  # they leave where dQ does
    inputs = Inputs(tensors, memory, scaling, biases)
    key_tiles = count_key_tiles(sizes, OPTIONS)
    slot = first_slot(0)
    kv_parity = 0
    tile_slot = first_slot(0)
    number, tile_slot = receive_first(memory.ring, tile_slot, OPTIONS)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, tensors, sizes, OPTIONS)
        key = first_own_key(tile, W, OPTIONS)
        # panels [KEYS, 64]
        zeros = gl.zeros([64, 64], gl.float32, S_L)
        dk = (zeros, zeros, zeros)
        dv = (zeros, zeros)
        mbarrier.wait(memory.kv_full, kv_parity)
        kv_parity ^= 1
        before = -1
        for member in range(sizes.group_size):
            head = head_of(inputs, tile, member, sizes, W, OPTIONS, S_L)
            state = HalfState(dk, dv, slot, before)
            dk, dv, slot, before = walk_half_head(inputs, tile, head, state, W, OPTIONS, S_L)
        give_last(inputs, slot, before, W, OPTIONS, S_L)
        if OPTIONS.PERSISTENT:
            mbarrier.arrive(memory.kv_empty, count=1)
            number, tile_slot = receive(memory.ring, tile_slot)
        else:
            number = key_tiles * sizes.batch_heads
        tma.store_wait(0)
        rows_v = rows_of_keys(tensors.dv, tile.batch, tile.head, tile.sequence)
        rows_k = rows_of_keys(tensors.dk, tile.batch, tile.head, tile.sequence)
        for panel in gl.static_range(2):
            give_gradient(dv[panel], rows_v, key, panel, staging.index(1 - panel))
        for panel in gl.static_range(3):
            give_gradient(dk[panel] * scaling.scale, rows_k, key, panel, staging.index(1 - panel % 2))
    tma.store_wait(0)
