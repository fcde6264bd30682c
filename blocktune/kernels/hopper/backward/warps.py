"""The warps of the Hopper attention backward, in Gluon: one that copies, two warpgroups that compute.

What makes it fast, and is easily lost when the code changes:

1. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T leave the accumulators as
   register operands of dV += P^T dO and dK += dS^T Q.
2. Each warpgroup owns 64 of the 128 keys. They only meet for dS: both write their half of dS^T to shared memory (two
   buffers), and each computes a half of dQ = dS K from the whole: half of the head dimension of 128, or, of head
   dimension 64, half of the queries (dQ^T = K^T dS^T).
3. delta and the log-sum-exp may enter as initial accumulators of dP and S (FOLD_DELTA, FOLD_LSE): fewer registers.
4. dQ is summed over the key tiles in float32 by the copy engine, which adds whole tiles to global memory. They keep the
   order of the accumulator registers: 16-byte stores and one copy per half; the next launch puts them in order.
5. Head dimension 64 (DEFER): K, V and K^T live in registers, and dQ of a block runs after S and dP of the next one.
6. Stage indices stay dynamic: with constant ones LLVM hoists all operand addresses out of the loop, and they spill.
7. Blocks are persistent (PERSISTENT), take tiles from a counter, longest first if causal, and copy K, V and the first
   Q and dO of the next tile during the epilogue.
8. In a fixed order of additions two warps of their own wait for the tile's turn, add dQ and pass the turn on
   (adders.py).
9. Hardware's named barriers may replace mbarriers between the warpgroups (barriers.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blocktune.kernels.hopper.backward.adders import await_last, await_place, dq_place
from blocktune.kernels.hopper.backward.ahead import walk_ahead
from blocktune.kernels.hopper.backward.arguments import Inputs
from blocktune.kernels.hopper.backward.barriers import await_named_release, await_values
from blocktune.kernels.hopper.backward.bounds import (
    batch_of,
    begins_with_masks,
    block_at,
    ends_with_masks,
    first_key_of,
    first_query,
    key_head_of,
    parts_of_walk,
    place_walk,
    rotate,
    walk_of_head,
)
from blocktune.kernels.hopper.backward.steps import (
    Operands,
    State,
    give_last_dq,
    head_of,
    layouts_of,
    settle_products,
    step,
)
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
from blocktune.kernels.hopper.biases.of_keys import prefetch_mask
from blocktune.kernels.hopper.common.device_functions import copy_in, copy_out, in_register_order, reinterpret
from blocktune.kernels.hopper.common.head_rows import load_panel, store_panel
from blocktune.kernels.hopper.common.slots import Slot, first_slot, next_slot, receive
from blocktune.kernels.hopper.common.tailed_columns import panel_of, scaled, two_panels


@gluon.jit
def load_tile(desc, tile, memory, tiles, OPTIONS: gl.constexpr):
    """Copy K or V of a tile, which are awaited together."""
    rows = rows_of_keys(desc, tile.batch, tile.head // OPTIONS.PARTS, tile.sequence)
    load_panel(rows, first_key_of(tile, OPTIONS), 0, memory.kv_full, tiles)


@gluon.jit
def load_keys(tile, tensors, memory, parity, OPTIONS: gl.constexpr):
    """Copy K and V of a tile, once those of the tile before are given back."""
    mbarrier.wait(memory.kv_empty, parity)
    mbarrier.expect(memory.kv_full, 2 * tensors.k.block_type.nbytes)
    load_tile(tensors.k, tile, memory, memory.k, OPTIONS)
    load_tile(tensors.v, tile, memory, memory.v, OPTIONS)


@gluon.jit
def load_keys_early(tile, tensors, memory, parity, issued, OPTIONS: gl.constexpr):
    """Copy V, then K, each as soon as that of the tile before has been read. issued: steps before this tile."""
    if issued > 0:
        await_values()
    mbarrier.expect(memory.kv_full, 2 * tensors.k.block_type.nbytes)
    load_tile(tensors.v, tile, memory, memory.v, OPTIONS)
    mbarrier.wait(memory.kv_empty, parity)
    load_tile(tensors.k, tile, memory, memory.k, OPTIONS)


@gluon.jit
def producer(tensors, memory, biases, sizes, OPTIONS: gl.constexpr):
    """Copy K and V of every tile of this block, Q, dO and their statistics of every step; fetch the next tiles.

    An additive mask is fetched into the L2 cache as far ahead as Q is copied.
    """
    STAGES: gl.constexpr = OPTIONS.STAGES
    EARLY: gl.constexpr = OPTIONS.AHEAD and OPTIONS.SHORT
    ROW_BYTES: gl.constexpr = tensors.q.block_type.nbytes + tensors.lse.block_type.nbytes
    key_tiles = count_key_tiles(sizes, OPTIONS)
    slot = first_slot(1)
    kv_parity = 1
    tile_slot = first_slot(1)
    issued = 0
    number, tile_slot = fetch_first(key_tiles, tensors, memory.ring, tile_slot, sizes, OPTIONS)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, tensors, sizes, OPTIONS)
        sequence, batch = tile.sequence, tile.batch
        for member in range(sizes.group_size):
            head = tile.head * sizes.group_size + member
            row = head_row(tile, member, sizes.group_size, sizes, OPTIONS)
            walk = walk_of_head(tile, member, tensors, sizes, OPTIONS)
            queries = rows_of_queries(tensors.q, batch, head, sequence)
            gradients = rows_of_queries(tensors.do, batch, head, sequence)
            for place in range(walk.first, walk.end, OPTIONS.BLOCK_M):
                at = rotate(walk, place, first_key_of(tile, OPTIONS), OPTIONS)
                m = first_query(block_at(walk, at, OPTIONS), OPTIONS)
                if OPTIONS.NAMED_RELEASE:
                    if issued >= STAGES:
                        await_named_release(slot.place)
                else:
                    mbarrier.wait(memory.q_empty.index(slot.place), slot.parity)
                q_full = memory.q_full.index(slot.place)
                mbarrier.expect(q_full, ROW_BYTES)
                load_panel(queries, m, 0, q_full, memory.q.index(slot.place))
                if OPTIONS.MASK == 2:
                    prefetch_mask(biases, tile, batch, head, m, OPTIONS)
                copy_in(tensors.lse, [row + m], q_full, memory.lse.index(slot.place))
                if not EARLY:
                    if (place == walk.first) & (member == 0):  # right behind the first Q
                        load_keys(tile, tensors, memory, kv_parity, OPTIONS)
                        kv_parity ^= 1
                do_full = memory.do_full.index(slot.place)
                mbarrier.expect(do_full, ROW_BYTES)
                load_panel(gradients, m, 0, do_full, memory.do.index(slot.place))
                copy_in(tensors.delta, [row + m], do_full, memory.delta.index(slot.place))
                if EARLY:
                    if (place == walk.first) & (member == 0):
                        load_keys_early(tile, tensors, memory, kv_parity, issued, OPTIONS)
                        kv_parity ^= 1
                slot = next_slot(slot, STAGES)
                issued += 1
        if OPTIONS.PERSISTENT:
            number, tile_slot = fetch_tile(key_tiles, tensors, memory.ring, tile_slot, sizes, OPTIONS)
        else:
            number = key_tiles * sizes.batch_heads
    if EARLY:
        if issued > 0:
            await_values()
    if OPTIONS.NAMED_RELEASE:  # take the last releases, so that no named barrier is left half full
        place = slot.place
        if issued < STAGES:
            place = 0
        last = Slot(place=place, parity=slot.parity)
        for i in range(gl.minimum(STAGES, issued)):
            await_named_release(last.place)
            last = next_slot(last, STAGES)


@gluon.jit
def walk_head(
    inputs, operands, tile, member, sizes, state, W: gl.constexpr, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr
):  # fmt: skip
    """Take the steps of the query head number `member`, and return the new state.

    From `low` to `high` every query sees every key. In a fixed order of additions the walk may go back (`block_at`),
    and where nothing is masked it begins elsewhere (`rotate`).
    """
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    head = head_of(inputs, tile, member, sizes, W, OPTIONS, LAYOUTS.scores)
    walk = place_walk(head.walk, OPTIONS)
    masked, whole, stop = walk.first, walk.low, walk.high
    for _ in range(parts_of_walk(OPTIONS)):
        if begins_with_masks(OPTIONS):
            for place in range(masked, whole, BLOCK_M):
                state = step(inputs, operands, tile, head, place, state, W, True, OPTIONS, LAYOUTS)
        for place in range(whole, stop, BLOCK_M):
            state = step(inputs, operands, tile, head, place, state, W, False, OPTIONS, LAYOUTS)
        masked, whole, stop = walk.high, walk.end, walk.end
    if ends_with_masks(OPTIONS):
        for place in range(walk.high, walk.end, BLOCK_M):
            state = step(inputs, operands, tile, head, place, state, W, True, OPTIONS, LAYOUTS)
    if OPTIONS.DEFER:
        give_last_dq(inputs, operands, tile, head, state, W, OPTIONS, LAYOUTS)
    return state


# ---- the ends of a tile


@gluon.jit
def put_partial(panels, desc, memory, block, OPTIONS: gl.constexpr):
    """Write a float32 gradient of 64 keys, which is the block number `block` of its kind, in the order of the
    accumulator registers: one half of its columns after the other, or with TAIL one panel."""
    if OPTIONS.TAIL:
        put_partial_panels(panels, desc, memory, block)
    else:
        put_partial_halves(panels[0], desc, memory, block)


@gluon.jit
def put_partial_panels(panels, desc, memory, block):
    """Write 64 columns and then those beyond them, by copies of as many columns as these are."""
    TAIL: gl.constexpr = panels[1].shape[1]
    first = block * (64 + TAIL)
    tma.store_wait(0)
    memory.store(in_register_order(panels[0]))
    fence_async_shared()
    for part in gl.static_range(64 // TAIL):
        copy_out(desc, [first + part * TAIL, 0], memory.slice(part * TAIL, TAIL))
    tma.store_wait(0)
    rest = memory.slice(0, TAIL)
    rest.store(in_register_order(panels[1]))
    fence_async_shared()
    copy_out(desc, [first + 64, 0], rest)


@gluon.jit
def put_partial_halves(gradient, desc, memory, block):
    """Write the low columns and then the high ones."""
    HALF: gl.constexpr = gradient.shape[1] // 2
    # [2, HALF, 64]
    x = gl.reshape(in_register_order(gradient), [2, HALF, 64])
    # [HALF, 64]
    low, high = gl.split(gl.permute(x, (1, 2, 0)))
    tma.store_wait(0)
    memory.store(low)
    fence_async_shared()
    copy_out(desc, [block * 2 * HALF, 0], memory)
    tma.store_wait(0)
    memory.store(high)
    fence_async_shared()
    copy_out(desc, [(block * 2 + 1) * HALF, 0], memory)


@gluon.jit
def gradient_place(memory, place, D: gl.constexpr):
    """Return the memory of a gradient of 64 keys, which leaves where dQ does."""
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return reinterpret(memory.dq.index(place), memory.k.dtype, [64, D], GRADIENT_L)


@gluon.jit
def put_gradient(panels, rows, key, staging, OPTIONS: gl.constexpr):
    """Write a gradient of 64 keys from `key` on by way of memory of dQ."""
    # panels of [64, head_dim]
    for panel in gl.static_range(len(panels)):
        panel_of(staging, panel, OPTIONS).store(panels[panel].to(rows.desc.dtype))
    fence_async_shared()
    store_panel(rows, key, 0, staging)


@gluon.jit
def put_apart(dk, dv, rows_k, rows_v, key, memory, ds, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Write dK and dV of 64 keys from `key` on by way of the two places of dQ, so that none waits for the other. dV
    leaves from where dQ left earlier. ds: of the step that comes next."""
    D: gl.constexpr = memory.k.shape[1]
    tma.store_wait(0)
    await_place(memory, ds, W, OPTIONS)
    put_gradient(dv, rows_v, key, gradient_place(memory, dq_place(ds, W, OPTIONS), D), OPTIONS)
    ds = next_slot(ds, 2)
    await_place(memory, ds, W, OPTIONS)
    put_gradient(dk, rows_k, key, gradient_place(memory, dq_place(ds, W, OPTIONS), D), OPTIONS)


@gluon.jit
def operands_of(keys, values, memory, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Return the `Operands` of a tile. keys, values: of the warpgroup."""
    if OPTIONS.DEFER:
        own_k = keys.load(gl.DotOperandLayout(0, LAYOUTS.scores, 2))
        own_v = values.load(gl.DotOperandLayout(0, LAYOUTS.scores, 2))
        return Operands(own_k, own_v, memory.k.permute((1, 0)).load(gl.DotOperandLayout(0, LAYOUTS.dq, 2)))
    else:
        return Operands(keys, values, memory.k)


@gluon.jit
def consumer(tensors, memory, scaling, biases, sizes, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute dK and dV of keys 64 W .. 64 W + 63 of every tile of this block, and a half of the tile's part of dQ.
    Gradients of several query heads that share the keys are summed in registers."""
    D: gl.constexpr = memory.k.shape[1]
    SPREAD: gl.constexpr = OPTIONS.SHORT and OPTIONS.DQ_SLOTS == 2 and OPTIONS.PARTS == 1
    LAYOUTS: gl.constexpr = layouts_of(OPTIONS, D, W)
    inputs = Inputs(tensors, memory, scaling, biases)
    staging = gradient_place(memory, W, D)
    keys, values = memory.k.slice(W * 64, 64, dim=0), memory.v.slice(W * 64, 64, dim=0)
    key_tiles = count_key_tiles(sizes, OPTIONS)
    slot = first_slot(0)
    ds = first_slot(0)
    kv_parity = 0
    tile_slot = first_slot(0)
    if not OPTIONS.AHEAD:
        settle_products()
    number, tile_slot = receive_first(memory.ring, tile_slot, OPTIONS)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, tensors, sizes, OPTIONS)
        # panels of [64, head_dim]
        if OPTIONS.TAIL:
            dk, dv = two_panels(OPTIONS, LAYOUTS), two_panels(OPTIONS, LAYOUTS)
        else:
            dk = (gl.zeros([64, D], gl.float32, LAYOUTS.gradients),)
            dv = (gl.zeros([64, D], gl.float32, LAYOUTS.gradients),)
        mbarrier.wait(memory.kv_full, kv_parity)
        kv_parity ^= 1
        operands = operands_of(keys, values, memory, OPTIONS, LAYOUTS)
        if OPTIONS.DEFER and OPTIONS.PERSISTENT:
            mbarrier.arrive(memory.kv_empty, count=1)  # K and V are in registers now
        if OPTIONS.AHEAD:
            dk, dv, slot, ds = walk_ahead(inputs, tile, sizes, State(dk, dv, slot, ds), W, OPTIONS, LAYOUTS)
        elif OPTIONS.GROUPED:
            for member in range(sizes.group_size):
                state = State(dk, dv, slot, ds)
                dk, dv, slot, ds = walk_head(inputs, operands, tile, member, sizes, state, W, OPTIONS, LAYOUTS)
        else:
            state = State(dk, dv, slot, ds)
            dk, dv, slot, ds = walk_head(inputs, operands, tile, 0, sizes, state, W, OPTIONS, LAYOUTS)
        if OPTIONS.PERSISTENT:
            if not OPTIONS.DEFER:
                mbarrier.arrive(memory.kv_empty, count=1)
            number, tile_slot = receive(memory.ring, tile_slot)
        else:
            number = key_tiles * sizes.batch_heads
        batch, key_head = batch_of(tile, sizes), key_head_of(tile, sizes)
        rows_v = rows_of_keys(tensors.dv, batch, key_head, tile.sequence)
        rows_k = rows_of_keys(tensors.dk, batch, key_head, tile.sequence)
        key = tile.n0 + W * 64
        if OPTIONS.ADDERS and not SPREAD:
            await_last(memory, ds, W, OPTIONS)
        if SPREAD:
            put_apart(scaled(dk, scaling.scale), dv, rows_k, rows_v, key, memory, ds, W, OPTIONS)
        elif OPTIONS.PARTS > 1:
            block = (tile.batch_head * key_tiles + tile.n) * 2 + W
            put_partial(dv, tensors.dv, memory.dq.index(W), block, OPTIONS)
            put_partial(dk, tensors.dk, memory.dq.index(W), block, OPTIONS)
        else:
            tma.store_wait(0)
            put_gradient(dv, rows_v, key, staging, OPTIONS)
            dk = scaled(dk, scaling.scale)
            tma.store_wait(0)
            put_gradient(dk, rows_k, key, staging, OPTIONS)
    tma.store_wait(0)
