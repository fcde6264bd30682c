"""Attention forward on Hopper's own instructions, in Gluon: the device functions of kernels/hopper/forward/kernel.py.

A block has one producer warp, which copies tiles by TMA, and CONSUMERS warpgroups of 64 query rows each, which compute.
What makes it fast, each measured alone (FlashAttention-3, arXiv 2407.08608, section 3, except 1, which is
FlashAttention-4's):

1. Lazy rescale: the running maximum is raised only when it is 2^8 too small. Otherwise the factor is exactly 1, and the
   warp branches around the multiplications of the accumulator. Whether it is, a thread asks of its own scores: most
   warps never exchange a maximum (row_maxima.py).
2. The scores of block j+1 and the second product of block j are issued together, and the softmax of j+1 runs during the
   second product. ptxas likes to move the wait for that product above the softmax; a barrier wait between the two is a
   branch that stops it.
3. One barrier wait per step: slot g holds K of block i and V of block i-1, and one `full` barrier announces both. Where
   few slots fit, as with 256 columns, ONE_RING gives every tile of K or V a slot and barriers of its own: five tiles
   where two pairs and a half would be, and V is awaited where it is needed, after the scores of the next block.
4. Blocks are persistent and fetch tiles from a counter, longest first if causal. Tiles that differ in length are
   fetched when the copies of the one before have been issued (`fetch`).
5. Only blocks that a bound cuts are masked. The loop walks towards key 0, and where all is aligned that is its first
   block alone, which stands before the loop; otherwise a branch in the loop decides. (Loops of their own for every kind
   of block take three times the instructions, and hold more values than there are registers: they spill.) ALiBi on
   both sides begins where the queries stand, and goes round (`walks_round`).

Why nothing hangs, whatever the lengths:

- Producer and consumers derive a tile's blocks, first .. last, from the same numbers by the same function, `key_range`.
  There is at least one block (where no row sees it, it is masked), so that every tile takes last - first + 2
  slots: K of the first step alone, then K of a block and V of the one before, then V alone. A slot is filled once,
  awaited once by every consumer, and released once by every consumer (with SPLIT_RELEASE once for K and once for V).
- A consumer whose rows see fewer blocks than the tile awaits and releases the others unused, before its first and after
  its last own one: `hand_back` counts (last - own_last) + (own_last - own_first + 2) + (own_first - first) slots, which
  is that very number.
- ONE_RING: a tile takes 2 (last - first + 1) slots in the order of use: K of the first step, then K of a block and V of
  the one before, then V. The first K is given back as the V before the second block would be, so that all steps are
  alike. Of blocks that a consumer does not see, one tile lies among its own (`passed_over`): V of the last one after
  its first K, K of the first one ahead of its last V. It then holds one tile, passes over another, and awaits a third,
  which takes three slots; two would hang.
- With one block only there are two slots: scores, product. Two stages of pairs are enough for any number: a consumer
  holds at most the slot of the step before and the one at hand, both full, and releases the former after it has awaited
  the latter; the producer fills them in the same order.
- Slot and phase run on from tile to tile on both sides. A slot's n-th use waits for the parity of n: the producer of
  the `empty` barriers' (from 1, so that the first use waits for nothing), consumers of the `full` one's (from 0).
- Tiles of packed sequences that have no queries are passed over by the producer alone. Consumers see none of them: they
  get all their tiles, the first one too, from the ring of tile numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import advance, locate, tanh
from blocktune.kernels.hopper.common.sinks import sink_of
from blocktune.kernels.hopper.common.slots import receive
from blocktune.kernels.hopper.forward.biases import (
    begins_with_mask,
    biased,
    biases_of_block,
    biases_of_tile,
    binary_part,
    distance_of_block,
    dropped,
    first_natural_softmax,
    is_crossed,
    kept_of_block,
    loaded_of_block,
    natural_scales,
)
from blocktune.kernels.hopper.forward.bounds import (
    hide,
    key_range,
    row_bounds,
    sequence,
    stretch,
    walk_start,
    walks_round,
)
from blocktune.kernels.hopper.forward.copies import hand_back, passed_over, release, store_rows, values_read
from blocktune.kernels.hopper.forward.output import in_place_of, send_panels, write
from blocktune.kernels.hopper.forward.row_maxima import first_softmax, log_sum_exp, row_sums, scales_of
from blocktune.kernels.hopper.forward.steps import (
    add_product,
    biased_scores,
    finished,
    no_sums,
    queries,
    rescaled,
    step,
)


@gluon.jit
def consumer(
    o_desc, lse, sinks, memory, cu_q, cu_k, scale, bend, biases, sizes, lse_rows, C: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """Computes rows 64 C .. 64 C + 63 of every tile of this block.

    EARLY_P converts the probabilities before the next scores are issued, otherwise beside them; KEEP_P names them in
    the wait for their product, which changes nothing but ptxas' schedule.
    """
    ROWS: gl.constexpr = 64
    O_WIDTH: gl.constexpr = memory.v[0].shape[2]
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    RAGGED: gl.constexpr = OPTIONS.RAGGED
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    LEFT: gl.constexpr = OPTIONS.LEFT
    ALIGNED: gl.constexpr = OPTIONS.ALIGNED
    SPLIT_RELEASE: gl.constexpr = OPTIONS.SPLIT_RELEASE
    ONE_RING: gl.constexpr = OPTIONS.ONE_RING
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    VARLEN: gl.constexpr = cu_q is not None
    LONGEST_FIRST: gl.constexpr = RIGHT and not LEFT
    SKIPS: gl.constexpr = RIGHT and not (ALIGNED and BLOCK_M == BLOCK_N)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    W: gl.constexpr = O_WIDTH if V_PANELS == 1 else O_WIDTH // 2
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, O_WIDTH, 16])
    REST_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    REST_P: gl.constexpr = gl.DotOperandLayout(0, REST_L, 2)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    head_group = sizes.head_group
    batch_heads = sizes.batch_heads
    num_heads = sizes.num_heads
    if OPTIONS.MASK == 2:
        scales = natural_scales(scale, biases.unit, OPTIONS)
    else:
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
    if VARLEN:
        tile, tile_slot, tile_phase = receive(memory.ring, tile_slot, tile_phase)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, head_group, batch_heads, LONGEST_FIRST)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        row_start = m * BLOCK_M + C * ROWS
        if VARLEN:
            begin_q, _, length_q, length_k, high, low = sequence(
                batch, sizes.right, sizes.left, cu_q, cu_k, OPTIONS.LOWER_RIGHT
            )
        else:
            begin_q = 0
            length_q, length_k, high, low = sizes.seqlen_q, sizes.seqlen_k, sizes.right, sizes.left
        moved = 0
        if OPTIONS.LOWER_RIGHT:
            moved = length_k - length_q
        tile_biases = biases_of_tile(biases, batch, head, row_start, length_q, no_acc, OPTIONS, S_L)
        first, last = key_range(m * BLOCK_M, length_q, length_k, high, low, BLOCK_M, BLOCK_N, RIGHT, LEFT)
        own_first, own_last = key_range(row_start, length_q, length_k, high, low, ROWS, BLOCK_N, RIGHT, LEFT)
        if LEFT:
            own_first = gl.maximum(own_first, first)
            own_last = gl.maximum(own_last, first)
        if SKIPS:  # blocks wholly right of what these rows see
            count = passed_over(last - own_last, ONE_RING)
            slot, phase = hand_back(count, memory, slot, phase, STAGES, SPLIT_RELEASE)

        # [64, BLOCK_N], step 0: the scores of the first block
        start = walk_start(m * BLOCK_M, biases.diagonal, own_last, BLOCK_M, OPTIONS)
        of_block = biases_of_block(start * BLOCK_N, row_start, moved, biases, tile_biases, OPTIONS)
        bias = biases, of_block, row_start, moved, batch_head
        loaded = loaded_of_block(tile_biases, start * BLOCK_N, OPTIONS, S_L)
        kept = kept_of_block(biases, tile_biases, row_start, start * BLOCK_N, batch_head, OPTIONS)
        mbarrier.wait(memory.q_full.index(C), q_phase)
        q = queries(memory.q, C, OPTIONS.Q_REGISTERS, OPTIONS.QK_PANELS, S_L)
        if begins_with_mask(OPTIONS):
            q = ((q[0] * binary_part(biases.unit)).to(memory.q[0].dtype),)
        if OPTIONS.FREE_Q and not OPTIONS.MASK:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        mbarrier.wait(memory.full.index(slot), phase)
        qk_t = biased_scores(memory, q, C, slot, start * BLOCK_N, no_acc, loaded, bias, OPTIONS, S_L)
        # Loads of queries may stand behind those of the mask until a product has them.
        if OPTIONS.FREE_Q and OPTIONS.MASK:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        qk = warpgroup_mma_wait(0, deps=(qk_t,))
        # not `previous = slot`: Triton 3.6 does not carry a name through a loop that starts as an alias of another one
        previous = slot + 0
        slot, phase = advance(slot, phase, STAGES)
        if SPLIT_RELEASE:
            mbarrier.arrive(memory.k_empty.index(previous), count=1)
        if ONE_RING and SKIPS:  # V of the last of these blocks
            slot, phase = hand_back(gl.minimum(last - own_last, 1), memory, slot, phase, STAGES, SPLIT_RELEASE)
        if OPTIONS.SOFTCAP:
            qk = tanh(qk * bend)
        crossed = is_crossed(start * BLOCK_N, row_start, moved, biases, OPTIONS)
        qk = biased(qk, start * BLOCK_N, crossed, row_start, moved, loaded, no_acc, biases, of_block, OPTIONS, S_L)
        last_seen, first_seen = row_bounds(row_start, length_k, high, low, ROWS, RAGGED, RIGHT, LEFT, ROW_S)
        qk = hide(qk, last_seen, first_seen, start * BLOCK_N, RAGGED or RIGHT, LEFT, S_L)
        # [64, BLOCK_N], its sums [64, 4]
        if OPTIONS.MASK == 2:
            p, top, factor, sums = first_natural_softmax(qk, no_acc, scales, S_L)
        else:
            distance = None
            if OPTIONS.LINES:
                distance = distance_of_block(start * BLOCK_N, row_start, moved, biases, of_block)
            p, top, factor, sums = first_softmax(qk, no_acc, scales, S_L, distance)
        p = dropped(p, kept, OPTIONS.DROPOUT, S_L)
        loaded = loaded_of_block(tile_biases, gl.maximum(own_last - 1, 0) * BLOCK_N, OPTIONS, S_L)
        if OPTIONS.EARLY_P:
            p = gl.convert_layout(p.to(memory.q[0].dtype), P_L)
        # [64, head_dim_v]
        acc = no_sums(ROWS, V_PANELS, W, O_L, REST_L)
        mbarrier.wait(memory.full.index(slot), phase)
        state = acc, p, factor, top, sums, loaded
        # blocks of keys from `lowest` to `highest` on are wholly visible
        highest = length_k - BLOCK_N
        if RIGHT:
            highest = gl.minimum(length_k, row_start + high + 1) - BLOCK_N
        lowest = 0
        if LEFT:
            lowest = row_start + ROWS - 1 + low
        seen = last_seen, first_seen

        # steps 1 ..: the scores of this block beside the second product of the one before
        if walks_round(OPTIONS):
            for part in range(3):
                block, steps, over, hidden = stretch(part, start, own_last, row_start + biases.diagonal, BLOCK_N)
                side = biases_of_block(block * BLOCK_N, row_start, moved, biases, tile_biases, OPTIONS)
                for i in range(steps):
                    state, slot, phase, previous = step(
                        memory, q, C, state, slot, phase, previous, ((block - i) * BLOCK_N, i < over, i < hidden), seen,
                        scales, bend, no_acc, (biases, side, row_start, moved, batch_head), OPTIONS, S_L, O_L, REST_L,
                    )  # fmt: skip
        else:
            for i in range(own_last - own_first):
                column = (own_last - 1 - i) * BLOCK_N
                side = biases_of_block(column, row_start, moved, biases, tile_biases, OPTIONS)
                over = is_crossed(column, row_start, moved, biases, OPTIONS)
                state, slot, phase, previous = step(
                    memory, q, C, state, slot, phase, previous,
                    (column, over, (column > highest) | (column < lowest)), seen,
                    scales, bend, no_acc, (biases, side, row_start, moved, batch_head), OPTIONS, S_L, O_L, REST_L,
                )  # fmt: skip
        acc, p, factor, top, sums, _ = state
        if ONE_RING and LEFT:  # K of the first block that these rows do not see
            slot, phase = hand_back(gl.minimum(own_first - first, 1), memory, slot, phase, STAGES, SPLIT_RELEASE)
            mbarrier.wait(memory.full.index(slot), phase)

        # [64, head_dim_v], last step: the second product alone
        acc = rescaled(acc, factor, V_PANELS, O_L, REST_L)
        if not OPTIONS.EARLY_P:
            p = gl.convert_layout(p.to(memory.q[0].dtype), P_L)
        acc_t = add_product(p, memory.v, slot, acc, V_PANELS, REST_P)
        sink = None
        if sinks is not None:
            sink = sink_of(sinks, head)  # on its way during the product
        values_read(memory, previous, SPLIT_RELEASE)
        if not OPTIONS.SHARE_O and not OPTIONS.FREE_Q:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        q_phase ^= 1
        tile, tile_slot, tile_phase = receive(memory.ring, tile_slot, tile_phase)
        # [64]
        total = row_sums(sums, top, sink, scales, ROW_S)
        acc = finished(acc_t, V_PANELS)
        release(memory, slot, SPLIT_RELEASE)
        slot, phase = advance(slot, phase, STAGES)
        if LEFT:  # blocks wholly left of what these rows see
            count = passed_over(own_first - first, ONE_RING)
            slot, phase = hand_back(count, memory, slot, phase, STAGES, SPLIT_RELEASE)
        o_tiles = memory.o
        o_place = C
        if OPTIONS.SHARE_O:
            o_tiles = in_place_of(memory.q, C, memory.v, V_PANELS)
            o_place = 0
        if row_start < length_q:
            divisor = total
            if OPTIONS.DROPOUT:
                divisor = total * biases.kept_share
            if OPTIONS.O_SLOTS > 0:
                goal = o_desc, batch, head, row_start, begin_q, length_q
                send_panels(acc[0], divisor, goal, memory.o[0], C, OPTIONS, VARLEN, O_L)
            else:
                tma.store_wait(0)
                write(acc, divisor, o_tiles, o_place, ALIGNED and not OPTIONS.MASK, V_PANELS, O_L, REST_L)
                fence_async_shared()
                store_rows(o_desc, batch, head, row_start, begin_q, length_q, o_tiles, o_place, V_PANELS, VARLEN)
            if lse is not None:
                row = batch_head.to(gl.int64) * lse_rows
                if VARLEN:
                    row = head.to(gl.int64) * lse_rows + begin_q
                # [64]
                rows = row_start + gl.arange(0, ROWS, ROW_S)
                sums_of_rows = log_sum_exp(top, total, sink, scales, ROW_S, OPTIONS.MASK == 2)
                gl.store(lse + row + rows, sums_of_rows, mask=rows < length_q)
        if OPTIONS.SHARE_O:  # the output has left, and the next Q may come
            tma.store_wait(0)
            mbarrier.arrive(memory.q_empty.index(C), count=1)
    tma.store_wait(0)
