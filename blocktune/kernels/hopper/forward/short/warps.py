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

from blocktune.kernels.hopper.common.device_functions import advance, locate, pin
from blocktune.kernels.hopper.common.slots import fetch, receive
from blocktune.kernels.hopper.forward.bounds import key_range
from blocktune.kernels.hopper.forward.copies import load_rows, values_read
from blocktune.kernels.hopper.forward.row_maxima import scales_of
from blocktune.kernels.hopper.forward.short.steps import pass_over, scores_read, step
from blocktune.kernels.hopper.forward.short.tile_ends import first_block, located, send
from blocktune.kernels.hopper.forward.steps import add_product, finished, no_sums, rescaled, scores


@gluon.jit
def producer(q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS: gl.constexpr):
    """Copies Q, K and V of every tile of this block, and fetches its next tiles from the counter."""
    ROWS: gl.constexpr = 64
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    SPLIT_RELEASE: gl.constexpr = OPTIONS.SPLIT_RELEASE
    Q_BYTES: gl.constexpr = q_desc.block_type.nbytes
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes
    V_BYTES: gl.constexpr = v_desc.block_type.nbytes
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    batch_heads, num_heads = sizes.batch_heads, sizes.num_heads
    q_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    slot = 0
    phase = 1
    q_phase = 1
    tile_slot = 0
    tile_phase = 1
    tile = gl.program_id(0)
    if tile < q_tiles * batch_heads:
        mbarrier.expect(memory.full.index(0), K_BYTES)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, sizes.head_group, batch_heads, RIGHT)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        _, last = key_range(m * BLOCK_M, seqlen_q, seqlen_k, sizes.right, 0, BLOCK_M, BLOCK_N, RIGHT, False)
        # K of the first block, into the slot of the last V of the tile before
        row = last * BLOCK_N
        load_rows(k_desc, batch, head_kv, row, 0, seqlen_k, memory.full.index(slot), memory.k, slot, 1, False)
        slot, phase = advance(slot, phase, STAGES)
        for c in gl.static_range(OPTIONS.CONSUMERS):
            mbarrier.wait(memory.q_empty.index(c), q_phase)
            q_full = memory.q_full.index(c)
            mbarrier.expect(q_full, Q_BYTES)
            load_rows(q_desc, batch, head, m * BLOCK_M + c * ROWS, 0, seqlen_q, q_full, memory.q, c, 1, False)
        q_phase ^= 1
        if not RIGHT:
            tile, tile_slot, tile_phase = fetch(counter, memory.ring, tile_slot, tile_phase)
        for i in range(last):  # K of a block and V of the one before
            row = (last - 1 - i) * BLOCK_N
            mbarrier.wait(memory.k_empty.index(slot), phase)
            full = memory.full.index(slot)
            mbarrier.expect(full, K_BYTES + V_BYTES)
            load_rows(k_desc, batch, head_kv, row, 0, seqlen_k, full, memory.k, slot, 1, False)
            if SPLIT_RELEASE:
                mbarrier.wait(memory.v_empty.index(slot), phase)
            load_rows(v_desc, batch, head_kv, row + BLOCK_N, 0, seqlen_k, full, memory.v, slot, 1, False)
            slot, phase = advance(slot, phase, STAGES)
        if RIGHT:  # tiles differ in length
            tile, tile_slot, tile_phase = fetch(counter, memory.ring, tile_slot, tile_phase)
        # V of the last block, beside K of the next tile's first one if there is a next tile
        mbarrier.wait(memory.k_empty.index(slot), phase)
        if tile < q_tiles * batch_heads:
            mbarrier.expect(memory.full.index(slot), K_BYTES + V_BYTES)
        else:
            mbarrier.expect(memory.full.index(slot), V_BYTES)
        if SPLIT_RELEASE:
            mbarrier.wait(memory.v_empty.index(slot), phase)
        load_rows(v_desc, batch, head_kv, 0, 0, seqlen_k, memory.full.index(slot), memory.v, slot, 1, False)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)


@gluon.jit
def consumer(o_desc, lse, sinks, memory, scale, sizes, lse_rows, C: gl.constexpr, OPTIONS: gl.constexpr):
    """Computes rows 64 C .. 64 C + 63 of every tile of this block.

    EARLY_P converts the probabilities before the next scores are issued, otherwise beside them; KEEP_P names them in
    the wait for their product, which changes nothing but ptxas' schedule. O_SLOTS: panels of memory for the output on
    its way out. JOINED: tiles meet in a step.
    """
    ROWS: gl.constexpr = 64
    O_WIDTH: gl.constexpr = memory.v[0].shape[2]
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    SPLIT_RELEASE: gl.constexpr = OPTIONS.SPLIT_RELEASE
    JOINED: gl.constexpr = OPTIONS.JOINED
    SKIPS: gl.constexpr = OPTIONS.RIGHT and not (OPTIONS.ALIGNED and BLOCK_M == BLOCK_N)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, O_WIDTH, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    dtype: gl.constexpr = memory.q[0].dtype
    batch_heads = sizes.batch_heads
    scales = scales_of(scale)
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    # [64, BLOCK_N]
    no_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, S_L)
    slot = 0
    phase = 0
    q_phase = 0
    tile_slot = 0
    tile_phase = 0
    tile = gl.program_id(0)
    live = tile < q_tiles * batch_heads
    rows, blocks = located(tile, q_tiles, sizes, C, OPTIONS)

    # [64, BLOCK_N], the scores of the first tile's first block
    if live:
        mbarrier.wait(memory.full.index(slot), phase)
        if SKIPS:  # blocks wholly right of what these rows see
            slot, phase = pass_over(blocks[0] - blocks[1], memory, slot, phase, STAGES, SPLIT_RELEASE)
        mbarrier.wait(memory.q_full.index(C), q_phase)
    qk_t = scores((memory.q[0].index(C),), memory.q, C, memory.k, slot, no_acc, False, 1)
    qk = warpgroup_mma_wait(0, deps=(qk_t,))
    scores_read(memory, C, slot, live & (blocks[1] == 0), SPLIT_RELEASE)
    p, top, factor, sums, mask = first_block(qk, rows[2], blocks[1], sizes, no_acc, scales, OPTIONS, S_L, P_L, dtype)
    while live:
        # steps: the scores of a block beside the second product of the one before
        # [64, head_dim_v]
        acc = no_sums(ROWS, 1, O_WIDTH, O_L, O_L)
        state = acc, p, factor, top, sums
        # not `previous = slot`: Triton 3.6 does not carry a name through a loop that starts as an alias of another one
        previous = slot + 0
        slot, phase = advance(slot, phase, STAGES)
        mbarrier.wait(memory.full.index(slot), phase)
        _, own_last = blocks
        for i in range(own_last):
            state, slot, phase, previous = step(
                memory, C, state, slot, phase, previous, (own_last - 1 - i) * BLOCK_N, mask, scales, no_acc, OPTIONS,
                S_L, O_L,
            )  # fmt: skip

        # the last product, the scores of the next tile's first block, and the output
        acc, p, factor, top, sums = state
        done, sums_done, top_done = rows, sums, top
        q_phase ^= 1
        if JOINED:
            tile, tile_slot, tile_phase = receive(memory.ring, tile_slot, tile_phase)
            live = tile < q_tiles * batch_heads
            rows, blocks = located(tile, q_tiles, sizes, C, OPTIONS)
            if live:
                mbarrier.wait(memory.q_full.index(C), q_phase)
            qk_t = scores((memory.q[0].index(C),), memory.q, C, memory.k, slot, no_acc, False, 1)
        acc = rescaled(acc, pin(factor), 1, O_L, O_L)
        if not OPTIONS.EARLY_P:
            p = gl.convert_layout(pin(p).to(dtype), P_L)
        values_read(memory, previous, SPLIT_RELEASE)
        acc_t = add_product(p, memory.v, slot, acc, 1, P_L)
        if JOINED:
            qk = warpgroup_mma_wait(1, deps=(qk_t,))
        else:
            tile, tile_slot, tile_phase = receive(memory.ring, tile_slot, tile_phase)
            live = tile < q_tiles * batch_heads
            rows, blocks = located(tile, q_tiles, sizes, C, OPTIONS)
            acc = finished(acc_t, 1)
            if live:
                if SKIPS:
                    slot, phase = pass_over(blocks[0] - blocks[1], memory, slot, phase, STAGES, SPLIT_RELEASE)
                mbarrier.wait(memory.q_full.index(C), q_phase)
            qk_t = scores((memory.q[0].index(C),), memory.q, C, memory.k, slot, no_acc, False, 1)
            send(
                acc, sums_done, top_done, done, scales, o_desc, lse, sinks, lse_rows, sizes, memory, C, OPTIONS, ROW_S,
                O_L,
            )  # fmt: skip
            qk = warpgroup_mma_wait(0, deps=(qk_t,))
        scores_read(memory, C, slot, live & (blocks[1] == 0), SPLIT_RELEASE)
        p, top, factor, sums, mask = first_block(
            qk, rows[2], blocks[1], sizes, no_acc, scales, OPTIONS, S_L, P_L, dtype
        )
        if JOINED:
            mbarrier.wait(memory.full.index(slot), phase)  # once more: the branch that keeps the wait below the softmax
            acc = finished(acc_t, 1)
            send(
                acc, sums_done, top_done, done, scales, o_desc, lse, sinks, lse_rows, sizes, memory, C, OPTIONS, ROW_S,
                O_L,
            )  # fmt: skip
    tma.store_wait(0)
