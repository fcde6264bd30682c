"""Attention forward of short sequences on Hopper, in Gluon: the warps of kernels/hopper/forward/short/kernel.py.

The pipeline is that of kernels/hopper/forward/consumer.py, whose header says what makes a tile fast. With few keys a
tile has few steps, and the time between tiles counts, so here they meet without a gap:

1. The slots of K and V are one stream over all tiles of a block: the last V of a tile and the first K of the next one
   share a slot.
2. Q goes back with its last scores, and the next tile's Q comes while the softmax and the last product are under way.
3. JOINED: the next tile's first scores are issued together with the last product, and their softmax runs during it, as
   in any step. Otherwise they are issued after it, and the output leaves during them. Only two consumers join tiles
   (more fill the gap for each other, and have no registers for it), and only where no warpgroup skips blocks between.
4. The output leaves in panels of one swizzle through as much memory as is left, which panels may take in turns.

Long sequences are slower by 1 to 3 % with this than with kernels/hopper/forward/consumer.py.

Why nothing hangs, whatever the lengths:

- Producer and consumers derive a tile's blocks, 0 .. last, from the same numbers by the same function, `key_range`.
  There is at least one block; where no row sees it, it is masked. In the order of tiles and of blocks from last
  to first, slot g holds K of block g of the stream and V of block g - 1: slot 0 no V, and the very last slot no K. A
  slot is filled once, awaited once by every consumer, and released once by every consumer, with SPLIT_RELEASE once for
  K and once for V; only the very last slot is never needed again, and the producer does not wait for it.
- A consumer whose rows see fewer blocks than the tile passes over the others (`pass_over`), last - own_last before its
  first scores: it releases the slot at hand unused and awaits the next.
- Two stages are enough for any number: a consumer that awaits a slot holds one other at most, that of the step before,
  which is full; and the producer fills them in the same order.
- The producer asks for Q's memory after the slot that has the tile's first K and the last V of the tile before. So all
  that a consumer needs to give Q back, every K of its tile, is there or under way by then. Nothing else waits for Q to
  go back.
- When a consumer asks which tile is next, the answer is there or under way: the producer publishes a tile's number
  before it loads the last V of the tile before, for which the consumer waits first. The ring has two places.
- After the last tile a consumer waits for nothing. It computes scores of what lies there, which are never used, so that
  no branch divides products in flight.
- Slot and phase run on from tile to tile on both sides. A slot's n-th use waits for the parity of n: the producer of
  the `empty` barriers' (from 1, so that the first use waits for nothing), consumers of the `full` one's (from 0).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import locate, pin
from blocktune.kernels.hopper.common.head_rows import HeadRows
from blocktune.kernels.hopper.common.sequences import key_range, whole_sequence
from blocktune.kernels.hopper.common.slots import fetch, first_slot, next_slot, receive
from blocktune.kernels.hopper.forward.consumer import skips_blocks
from blocktune.kernels.hopper.forward.copies import load_rows, release_values
from blocktune.kernels.hopper.forward.row_maxima import scales_of
from blocktune.kernels.hopper.forward.short.steps import pass_over, release_keys, step
from blocktune.kernels.hopper.forward.short.tile_ends import first_block, place_of, send
from blocktune.kernels.hopper.forward.steps import (
    State,
    Tile,
    add_product,
    finished,
    layouts_of,
    no_sums,
    queries,
    rescaled,
    scores,
)


@gluon.jit
def producer(tensors, memory, sizes, OPTIONS: gl.constexpr):
    """Copy Q, K and V of every tile of this block, and fetch its next tiles from the counter."""
    ROWS: gl.constexpr = 64
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    Q_BYTES: gl.constexpr = tensors.q.block_type.nbytes
    K_BYTES: gl.constexpr = tensors.k.block_type.nbytes
    V_BYTES: gl.constexpr = tensors.v.block_type.nbytes
    counter, num_heads = tensors.counter, sizes.num_heads
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    tiles = q_tiles * sizes.batch_heads
    slot = first_slot(1)
    q_parity = 1
    tile_slot = first_slot(1)
    tile = gl.program_id(0)
    if tile < tiles:
        mbarrier.expect(memory.full.index(0), K_BYTES)
    while tile < tiles:
        m, batch_head = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, OPTIONS.RIGHT)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        queries = HeadRows(tensors.q, batch, head, 0, sizes.seqlen_q)
        keys = HeadRows(tensors.k, batch, head_kv, 0, sizes.seqlen_k)
        values = HeadRows(tensors.v, batch, head_kv, 0, sizes.seqlen_k)
        last = key_range(m * BLOCK_M, whole_sequence(sizes), BLOCK_M, OPTIONS).last
        # K of the first block, into the slot of the last V of the tile before
        load_rows(keys, last * BLOCK_N, memory.full.index(slot.place), memory.k, slot.place)
        slot = next_slot(slot, OPTIONS.STAGES)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(memory.q_empty.index(c), q_parity)
            q_full = memory.q_full.index(c)
            mbarrier.expect(q_full, Q_BYTES)
            load_rows(queries, m * BLOCK_M + c * ROWS, q_full, memory.q, c)
        q_parity ^= 1
        if not OPTIONS.RIGHT:
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
        for i in range(last):  # K of a block and V of the one before
            row = (last - 1 - i) * BLOCK_N
            mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
            full = memory.full.index(slot.place)
            mbarrier.expect(full, K_BYTES + V_BYTES)
            load_rows(keys, row, full, memory.k, slot.place)
            if OPTIONS.SPLIT_RELEASE:
                mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
            load_rows(values, row + BLOCK_N, full, memory.v, slot.place)
            slot = next_slot(slot, OPTIONS.STAGES)
        if OPTIONS.RIGHT:  # tiles differ in length
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
        # V of the last block, beside K of the next tile's first one if there is a next tile
        mbarrier.wait(memory.k_empty.index(slot.place), slot.parity)
        if tile < tiles:
            mbarrier.expect(memory.full.index(slot.place), K_BYTES + V_BYTES)
        else:
            mbarrier.expect(memory.full.index(slot.place), V_BYTES)
        if OPTIONS.SPLIT_RELEASE:
            mbarrier.wait(memory.v_empty.index(slot.place), slot.parity)
        load_rows(values, 0, memory.full.index(slot.place), memory.v, slot.place)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)


@gluon.jit
def consumer(tensors, memory, scaling, sizes, C: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute rows 64 C .. 64 C + 63 of every tile of this block."""
    ROWS: gl.constexpr = 64
    WIDTH: gl.constexpr = memory.v[0].shape[2]
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    LAYOUTS: gl.constexpr = layouts_of(BLOCK_N, WIDTH, 1)
    dtype: gl.constexpr = memory.q[0].dtype
    scales = scales_of(scaling.scale_log2)
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    tiles = q_tiles * sizes.batch_heads
    # [64, BLOCK_N]
    no_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUTS.scores)
    slot = first_slot(0)
    q_parity = 0
    tile_slot = first_slot(0)
    number = gl.program_id(0)
    live = number < tiles
    place = place_of(number, q_tiles, sizes, C, OPTIONS)

    # [64, BLOCK_N], the scores of the first tile's first block
    if live:
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        if skips_blocks(OPTIONS):  # blocks wholly right of what these rows see
            slot = pass_over(place.last - place.own_last, memory, slot, OPTIONS)
        mbarrier.wait(memory.q_full.index(C), q_parity)
    q = queries(memory.q, C, 0, LAYOUTS.scores)
    qk_t = scores(q, memory, C, slot.place, no_acc, False)
    qk = warpgroup_mma_wait(0, deps=(qk_t,))
    release_keys(memory, C, slot.place, live & (place.own_last == 0), OPTIONS)
    first, seen = first_block(qk, place, sizes, no_acc, scales, OPTIONS, LAYOUTS, dtype)
    while live:
        # steps: the scores of a block beside the second product of the one before
        tile = Tile(memory=memory, C=C, q=q, scales=scales, bend=None, bias=None, no_acc=no_acc)
        # [64, head_dim_v]
        acc = no_sums(ROWS, WIDTH, 1, LAYOUTS)
        p, top, factor, sums = first
        state = State(acc=acc, p=p, factor=factor, top=top, sums=sums, loaded=0)
        # not the slot itself: Triton 3.6 does not carry a name through a loop that starts as an alias of another one
        previous = slot.place + 0
        slot = next_slot(slot, OPTIONS.STAGES)
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        for i in range(place.own_last):
            column = (place.own_last - 1 - i) * BLOCK_N
            state, slot, previous = step(tile, seen, state, slot, previous, column, OPTIONS, LAYOUTS)

        # the last product, the scores of the next tile's first block, and the output
        done = place
        q_parity ^= 1
        if OPTIONS.JOINED:
            number, tile_slot = receive(memory.ring, tile_slot)
            live = number < tiles
            place = place_of(number, q_tiles, sizes, C, OPTIONS)
            if live:
                mbarrier.wait(memory.q_full.index(C), q_parity)
            qk_t = scores(q, memory, C, slot.place, no_acc, False)
        acc = rescaled(state.acc, pin(state.factor), LAYOUTS)
        p = state.p
        if not OPTIONS.EARLY_P:
            p = gl.convert_layout(pin(p).to(dtype), LAYOUTS.p)
        release_values(memory, previous, OPTIONS)
        acc_t = add_product(p, memory.v, slot.place, acc, LAYOUTS)
        if OPTIONS.JOINED:
            qk = warpgroup_mma_wait(1, deps=(qk_t,))
        else:
            number, tile_slot = receive(memory.ring, tile_slot)
            live = number < tiles
            place = place_of(number, q_tiles, sizes, C, OPTIONS)
            acc = finished(acc_t)
            if live:
                if skips_blocks(OPTIONS):
                    slot = pass_over(place.last - place.own_last, memory, slot, OPTIONS)
                mbarrier.wait(memory.q_full.index(C), q_parity)
            qk_t = scores(q, memory, C, slot.place, no_acc, False)
            send(acc, state, done, scales, tensors, memory, sizes, C, OPTIONS, LAYOUTS)
            qk = warpgroup_mma_wait(0, deps=(qk_t,))
        release_keys(memory, C, slot.place, live & (place.own_last == 0), OPTIONS)
        first, seen = first_block(qk, place, sizes, no_acc, scales, OPTIONS, LAYOUTS, dtype)
        if OPTIONS.JOINED:
            # once more: the branch that keeps the wait below the softmax
            mbarrier.wait(memory.full.index(slot.place), slot.parity)
            acc = finished(acc_t)
            send(acc, state, done, scales, tensors, memory, sizes, C, OPTIONS, LAYOUTS)
    tma.store_wait(0)
