"""The Hopper attention backward for heads wider than 128, in Gluon: two warpgroups that compute, one warp that copies.

dK and dV of 64 keys and 256 columns fill two warpgroups' registers, so the warpgroups share the products instead of the
keys, all five once:

    warpgroup 0:  S^T = K Q^T,  P,   dV += P^T dO,   its part of dQ = dS K
    warpgroup 1:  dP^T = V dO^T, dS,  dK += dS^T Q,   its part of dQ

P goes from 0 to 1 in float32 and in the order of the registers, which are the same in both: 16-byte accesses, no
layout to be changed. dS comes back as the operand of dQ. Heads are panels of 64 columns, three or four, those of values
and outputs two to four: operands, accumulators, copies and parts of dQ alike; a last panel that is not full ends with
zeros.

What makes it fast, and is easily lost when the code changes:

1. No step loads a spilled register. Addresses of operands are computed in every step (`hidden_zero`).
2. A warpgroup has memory for one panel of dQ on its way to the sums, and two panels in a step, or 1 of three panels
   one. With three panels (`LATE`) the second one of 0 stays in registers until the copy engine has read the first, and
   is added during the next dV; with four every panel is added at once, and dK's products hide the wait of 1. On an H200
   with 8192 keys, late against at once, in TFLOP/s: three panels 514 against 392 full, 501 against 394 causal; four
   panels 474 against 507 and 462 against 494: there it takes 32 registers of a step that has none left. (What was
   late had the two buffers of 3 as well.)
3. K and V are given back ahead of a late panel of dQ, and dV and dK leave through two buffers in turns.
4. In a fixed order of additions two warps of their own wait for the tile's turn and pass it on (turns.py); the
   warpgroups add the panels, as in any order. A step reports those of the step before when they are added without a
   wait: 0 during dV, 1 while it waits for P. A late panel is added while S runs, not during dV, so that the turn is
   passed on in time: on an H200 1 to 4 % faster.

Barriers. A step has one exchange in each direction, P then dS, so that neither buffer needs a second one: warpgroup 0
writes P of step j + 1 after its wait for dS of step j, which 1 sent after its reading of P; 1 writes dS of step j + 1
after its wait for P of step j + 1, which 0 sent after its products with dS of step j were complete. Both wait in every
step for what the other sends in that step, and a tile has at least one (`query_range`), so that phases agree for one
step as for many. Q, and dO apart from it, are released by both warpgroups in every step (count 2), and the producer
waits for a slot from its second filling on: the parity it starts with lets the first ones pass.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blocktune.kernels.hopper.backward.arguments import Inputs
from blocktune.kernels.hopper.backward.barriers import report_added
from blocktune.kernels.hopper.backward.bounds import (
    begins_with_masks,
    block_at,
    ends_with_masks,
    parts_of_walk,
    place_walk,
)
from blocktune.kernels.hopper.backward.steps import head_of
from blocktune.kernels.hopper.backward.tiles import (
    count_key_tiles,
    fetch_first,
    fetch_tile,
    head_row,
    receive_first,
    rows_of_keys,
    rows_of_queries,
    tile_of_keys,
)
from blocktune.kernels.hopper.backward.wide.steps import LATE, WideState, give_panel, step_of_gradients, step_of_scores
from blocktune.kernels.hopper.common.device_functions import copy_in, reinterpret
from blocktune.kernels.hopper.common.head_rows import load_panel, store_panel
from blocktune.kernels.hopper.common.slots import first_slot, next_slot, receive

# mypy: disable-error-code="assignment,var-annotated"


@gluon.jit
def wide_step(
    inputs, tile, head, m, start, state, W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr
):  # fmt: skip
    """Compute one block of queries from m on, in either warpgroup. Return the new state."""
    if W == 0:
        return step_of_scores(inputs, tile, head, m, start, state, MASK, OPTIONS, S_L)
    else:
        return step_of_gradients(inputs, head, m, start, state, OPTIONS, S_L)


@gluon.jit
def walk_wide_head(inputs, tile, head, state, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """Take the steps of one query head, and return the new state. Only P is masked, and only in warpgroup 0. In a fixed
    order of additions the walk may go back (`block_at`)."""
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    walk = place_walk(head.walk, OPTIONS)
    start = block_at(walk, walk.first, OPTIONS)
    masked, whole, stop = walk.first, walk.low, walk.high
    if W == 1:
        whole, stop = walk.first, walk.end
    for _ in range(parts_of_walk(OPTIONS)):
        if W == 0 and begins_with_masks(OPTIONS):
            for place in range(masked, whole, BLOCK_M):
                m = block_at(walk, place, OPTIONS)
                state = wide_step(inputs, tile, head, m, start, state, W, True, OPTIONS, S_L)
        for place in range(whole, stop, BLOCK_M):
            m = block_at(walk, place, OPTIONS)
            state = wide_step(inputs, tile, head, m, start, state, W, False, OPTIONS, S_L)
        masked, whole, stop = walk.high, walk.end, walk.end
    if W == 0 and ends_with_masks(OPTIONS):
        for place in range(walk.high, walk.end, BLOCK_M):
            m = block_at(walk, place, OPTIONS)
            state = wide_step(inputs, tile, head, m, start, state, W, True, OPTIONS, S_L)
    return state


@gluon.jit
def finish_head(inputs, head, state, last, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Give K and V back after the last query head, add the panel of dQ that is held back, and report it."""
    if OPTIONS.PERSISTENT:
        mbarrier.arrive(inputs.memory.kv_empty, count=1, pred=last)
    if W == 0 and OPTIONS.PANELS == LATE:
        block = block_at(head.walk, head.walk.end - OPTIONS.BLOCK_M, OPTIONS)
        give_panel(state.gradients[OPTIONS.V_PANELS], inputs, head.row + block, 0, 1, OPTIONS)
    if OPTIONS.ORDERED:
        report_added(state.parity ^ 1, 1)


@gluon.jit
def give_gradient(gradient, rows, key, panel: gl.constexpr, place):
    """Write a panel of dK or dV of 64 keys from `key` on by way of a place in memory that the last but one left
    from."""
    tma.store_wait(1)
    place.store(gradient.to(place.dtype))
    fence_async_shared()
    store_panel(rows, key, panel * 64, place)


@gluon.jit
def wide_consumer(tensors, memory, scaling, biases, sizes, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute dV (W 0) or dK (W 1) of every tile of this block, and a part of the tile's dQ."""
    PANELS: gl.constexpr = OPTIONS.PANELS
    OWN_PANELS: gl.constexpr = OPTIONS.V_PANELS if W == 0 else PANELS
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    # [2, BLOCK_N, 64]
    staging = reinterpret(memory.dq.index(W), memory.k.dtype, [2, BLOCK_N, 64], GRADIENT_L)  # they leave where dQ does
    inputs = Inputs(tensors, memory, scaling, biases)
    key_tiles = count_key_tiles(sizes, OPTIONS)
    slot = first_slot(0)
    do_slot = first_slot(0)
    parity = 0
    kv_parity = 0
    tile_slot = first_slot(0)
    number, tile_slot = receive_first(memory.ring, tile_slot, OPTIONS)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, tensors, sizes, OPTIONS)
        # panels [BLOCK_N, 64]
        gradients = ()
        for _ in gl.static_range(OWN_PANELS + 1 if W == 0 and PANELS == LATE else OWN_PANELS):
            gradients = gradients + (gl.zeros([BLOCK_N, 64], gl.float32, S_L),)  # noqa: RUF005
        mbarrier.wait(memory.kv_full, kv_parity)
        kv_parity ^= 1
        for member in range(sizes.group_size):
            head = head_of(inputs, tile, member, sizes, W, OPTIONS, S_L)
            last = member == sizes.group_size - 1
            state = WideState(gradients, slot, do_slot, parity)
            state = walk_wide_head(inputs, tile, head, state, W, OPTIONS, S_L)
            finish_head(inputs, head, state, last, W, OPTIONS)
            gradients, slot, do_slot, parity = state
        if OPTIONS.PERSISTENT:
            number, tile_slot = receive(memory.ring, tile_slot)
        else:
            number = key_tiles * sizes.batch_heads
        tma.store_wait(0)
        rows = rows_of_keys(tensors.dv if W == 0 else tensors.dk, tile.batch, tile.head, tile.sequence)
        for panel in gl.static_range(OWN_PANELS):
            gradient = gradients[panel]
            if W == 1:
                gradient = gradient * scaling.scale
            give_gradient(gradient, rows, tile.n0, panel, staging.index(panel % 2))
    tma.store_wait(0)


@gluon.jit
def load_panels(rows, row, barrier, tiles, place, PANELS: gl.constexpr):
    """Copy all panels of 64 rows from `row` on, to slot `place`."""
    for panel in gl.static_range(PANELS):
        load_panel(rows, row, panel * 64, barrier, tiles.index(place * PANELS + panel))


@gluon.jit
def load_wide_keys(keys, values, key, memory, parity, OPTIONS: gl.constexpr):
    """Copy all panels of K and V of a tile from `key` on, once those of the tile before are given back."""
    PANELS: gl.constexpr = OPTIONS.PANELS + OPTIONS.V_PANELS
    mbarrier.wait(memory.kv_empty, parity)
    mbarrier.expect(memory.kv_full, PANELS * keys.desc.block_type.nbytes)
    load_panels(keys, key, memory.kv_full, memory.k, 0, OPTIONS.PANELS)
    load_panels(values, key, memory.kv_full, memory.v, 0, OPTIONS.V_PANELS)


@gluon.jit
def wide_producer(tensors, memory, sizes, OPTIONS: gl.constexpr):
    """Copy K and V of every tile of this block, Q, dO and their statistics of every step; fetch the next tiles."""
    PANELS: gl.constexpr = OPTIONS.PANELS
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    PANEL_BYTES: gl.constexpr = tensors.q.block_type.nbytes
    STATISTIC_BYTES: gl.constexpr = tensors.lse.block_type.nbytes
    key_tiles = count_key_tiles(sizes, OPTIONS)
    slot = first_slot(1)
    do_slot = first_slot(1)
    kv_parity = 1
    tile_slot = first_slot(1)
    number, tile_slot = fetch_first(key_tiles, tensors, memory.ring, tile_slot, sizes, OPTIONS)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, tensors, sizes, OPTIONS)
        sequence, walk, batch = tile.sequence, tile.walk, tile.batch
        keys = rows_of_keys(tensors.k, batch, tile.head // OPTIONS.PARTS, sequence)
        values = rows_of_keys(tensors.v, batch, tile.head // OPTIONS.PARTS, sequence)
        for member in range(sizes.group_size):
            head = tile.head * sizes.group_size + member
            row = head_row(tile, member, sizes.group_size, sizes, OPTIONS)
            queries = rows_of_queries(tensors.q, batch, head, sequence)
            gradients = rows_of_queries(tensors.do, batch, head, sequence)
            for place in range(walk.first, walk.end, OPTIONS.BLOCK_M):
                m = block_at(walk, place, OPTIONS)
                mbarrier.wait(memory.q_empty.index(slot.place), slot.parity)
                full = memory.q_full.index(slot.place)
                mbarrier.expect(full, PANELS * PANEL_BYTES + STATISTIC_BYTES)
                load_panels(queries, m, full, memory.q, slot.place, PANELS)
                copy_in(tensors.lse, [row + m], full, memory.lse.index(slot.place))
                if (place == walk.first) & (member == 0):  # right behind the first Q
                    load_wide_keys(keys, values, tile.n0, memory, kv_parity, OPTIONS)
                    kv_parity ^= 1
                mbarrier.wait(memory.do_empty.index(do_slot.place), do_slot.parity)
                do_full = memory.do_full.index(do_slot.place)
                mbarrier.expect(do_full, V_PANELS * PANEL_BYTES + STATISTIC_BYTES)
                load_panels(gradients, m, do_full, memory.do, do_slot.place, V_PANELS)
                copy_in(tensors.delta, [row + m], do_full, memory.delta.index(do_slot.place))
                slot = next_slot(slot, OPTIONS.STAGES)
                do_slot = next_slot(do_slot, OPTIONS.DO_STAGES)
        if OPTIONS.PERSISTENT:
            number, tile_slot = fetch_tile(key_tiles, tensors, memory.ring, tile_slot, sizes, OPTIONS)
        else:
            number = key_tiles * sizes.batch_heads
