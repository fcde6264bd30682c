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
   few slots fit, as with head_dim 256, ONE_RING gives every tile of K or V a slot and barriers of its own: five tiles
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
  alike. Of blocks that a consumer does not see, one tile lies among its own (`unseen_slots`): V of the last one after
  its first K, K of the first one ahead of its last V. It then holds one tile, passes over another, and awaits a third,
  which takes three slots; two would hang.
- With one block only there are two slots: scores, product. Two stages of pairs are enough for any number: a consumer
  holds at most the slot of the step before and the one at hand, both full, and releases the former after it has awaited
  the latter; the producer fills them in the same order.
- Slot and phase run on from tile to tile on both sides. A slot's n-th use waits for the parity of n: the producer of
  the `empty` barriers' (from 1, so that the first use waits for nothing), consumers of the `full` one's (from 0).
- Where tiles differ in length the number of the next one comes after the last copy of this one. So a consumer that sees
  fewer blocks on the left asks for it when it has handed these back: copies that are still to come wait for its slots.
- Tiles of packed sequences that have no queries are passed over by the producer alone. Consumers see none of them: they
  get all their tiles, the first one too, from the ring of tile numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import locate, tanh
from blocktune.kernels.hopper.common.head_rows import HeadRows
from blocktune.kernels.hopper.common.sequences import KeyBlocks, hide, key_range, mask_bounds, row_bounds
from blocktune.kernels.hopper.common.sinks import sink_of
from blocktune.kernels.hopper.common.slots import first_slot, next_slot, receive
from blocktune.kernels.hopper.forward.biases import (
    TileBiases,
    add_biases,
    begins_with_mask,
    biases_of_rows,
    binary_part,
    distance_of_block,
    dropped,
    first_natural_softmax,
    is_crossed,
    kept_of_block,
    line_of_keys,
    loaded_of_block,
    natural_scales,
)
from blocktune.kernels.hopper.forward.bounds import (
    blocks_of_part,
    key_part,
    output_head,
    sequence_of,
    stretch,
    walk_start,
    walks_round,
)
from blocktune.kernels.hopper.forward.copies import (
    hand_back,
    release,
    release_values,
    store_rows,
    unseen_slots,
)
from blocktune.kernels.hopper.forward.output import in_place_of, send_panels, write
from blocktune.kernels.hopper.forward.row_maxima import first_softmax, log_sum_exp, row_sums, scales_of
from blocktune.kernels.hopper.forward.steps import (
    Block,
    State,
    Tile,
    add_product,
    biased_scores,
    finished,
    layouts_of,
    no_sums,
    queries,
    rescaled,
    step,
)


@gluon.constexpr_function
def skips_blocks(options):
    """Return whether rows of a consumer may see fewer blocks on the right than their tile does."""
    return options.RIGHT and not (options.ALIGNED and 64 * options.CONSUMERS == options.BLOCK_N)


@gluon.jit
def walk_blocks(tile, seen, slot, previous, state, start, own, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Take the steps of a walk after its first block `start`: the scores of a block beside the second product of the
    one before. Return the state, the slot and the place of the one before.

    A loop carries names in the order of their appearance: with the state before the slot the machine code is another.
    """
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    if walks_round(OPTIONS):
        for part in range(3):
            block, steps, over, hidden = stretch(part, start, own.last, tile.bias.place, BLOCK_N)
            line = line_of_keys(block * BLOCK_N, tile.bias, OPTIONS)
            for i in range(steps):
                at = Block(column=(block - i) * BLOCK_N, line=line, crossed=i < over, hidden=i < hidden)
                state, slot, previous = step(tile, seen, state, slot, previous, at, OPTIONS, LAYOUTS)
    else:
        for i in range(own.last - own.first):
            column = (own.last - 1 - i) * BLOCK_N
            line = line_of_keys(column, tile.bias, OPTIONS)
            crossed = is_crossed(column, tile.bias, OPTIONS)
            hidden = (column > seen.highest) | (column < seen.lowest)
            at = Block(column=column, line=line, crossed=crossed, hidden=hidden)
            state, slot, previous = step(tile, seen, state, slot, previous, at, OPTIONS, LAYOUTS)
    return state, slot, previous


@gluon.jit
def send_output(acc, total, rows, row, memory, C: gl.constexpr, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Send the accumulators over the sums `total` of their rows on their way to the rows from `row` on."""
    ALIGNED: gl.constexpr = OPTIONS.ALIGNED and not OPTIONS.MASK
    if OPTIONS.O_SLOTS > 0:
        send_panels(acc[0], total, rows, row, memory.o[0], C, OPTIONS.O_SLOTS, ALIGNED, LAYOUTS.out)
    else:
        tma.store_wait(0)
        if OPTIONS.SHARE_O:
            tiles = in_place_of(memory.q, C, memory.v)
            place = 0
        else:
            tiles = memory.o
            place = C
        write(acc, total, tiles, place, ALIGNED, LAYOUTS)
        fence_async_shared()
        store_rows(rows, row, tiles, place)


@gluon.jit
def consumer(tensors, memory, scaling, biases, sizes, C: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute rows 64 C .. 64 C + 63 of every tile of this block."""
    ROWS: gl.constexpr = 64
    WIDTH: gl.constexpr = memory.v[0].shape[2]
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    LAYOUTS: gl.constexpr = layouts_of(BLOCK_N, WIDTH, OPTIONS.V_PANELS)
    VARLEN: gl.constexpr = tensors.cu_q is not None
    LONGEST_FIRST: gl.constexpr = OPTIONS.RIGHT and not OPTIONS.LEFT
    RECEIVES_LAST: gl.constexpr = OPTIONS.LEFT and (VARLEN or tensors.lengths is not None)
    num_heads = sizes.num_heads
    if OPTIONS.MASK == 2:
        scales = natural_scales(scaling.scale_log2, biases.unit, OPTIONS)
    else:
        scales = scales_of(scaling.scale_log2)
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    # [64, BLOCK_N]
    no_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUTS.scores)
    slot = first_slot(0)
    q_parity = 0
    tile_slot = first_slot(0)
    number = gl.program_id(0)
    if VARLEN:
        number, tile_slot = receive(memory.ring, tile_slot)
    while number < q_tiles * sizes.batch_heads:
        m, place = locate(number, q_tiles, sizes.head_group, sizes.batch_heads, LONGEST_FIRST)
        part = key_part(place, OPTIONS.KEY_PARTS)
        batch_head = part.batch_head
        batch = batch_head // num_heads
        head = batch_head % num_heads
        row = m * BLOCK_M + C * ROWS
        sequence = sequence_of(batch, tensors, sizes, OPTIONS.LOWER_RIGHT)
        of_rows = biases_of_rows(biases, batch, head, row, sequence, no_acc, OPTIONS, LAYOUTS.scores)
        bias = TileBiases(biases, batch_head, row, *of_rows)
        blocks = key_range(m * BLOCK_M, sequence, BLOCK_M, OPTIONS)
        blocks = blocks_of_part(blocks, part.number, OPTIONS.KEY_PARTS)
        own = key_range(row, sequence, ROWS, OPTIONS)
        if OPTIONS.KEY_PARTS > 1:
            own = KeyBlocks(first=blocks.first, last=gl.minimum(gl.maximum(own.last, blocks.first), blocks.last))
        if OPTIONS.LEFT:
            own = KeyBlocks(first=gl.maximum(own.first, blocks.first), last=gl.maximum(own.last, blocks.first))
        if skips_blocks(OPTIONS):  # blocks wholly right of what these rows see
            slot = hand_back(unseen_slots(blocks.last - own.last, OPTIONS.ONE_RING), memory, slot, OPTIONS)

        # [64, BLOCK_N], step 0: the scores of the first block
        start = walk_start(m * BLOCK_M, biases.diagonal, own.last, BLOCK_M, OPTIONS)
        column = start * BLOCK_N
        line = line_of_keys(column, bias, OPTIONS)
        loaded = loaded_of_block(bias, column, OPTIONS, LAYOUTS.scores)
        kept = kept_of_block(bias, column, OPTIONS)
        mbarrier.wait(memory.q_full.index(C), q_parity)
        q = queries(memory.q, C, OPTIONS.Q_REGISTERS, LAYOUTS.scores)
        if begins_with_mask(OPTIONS):
            q = ((q[0] * binary_part(biases.unit)).to(memory.q[0].dtype),)
        if OPTIONS.FREE_Q and not OPTIONS.MASK:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        tile = Tile(memory=memory, C=C, q=q, scales=scales, bend=scaling.bend, bias=bias, no_acc=no_acc)
        block = Block(column=column, line=line, crossed=is_crossed(column, bias, OPTIONS), hidden=True)
        qk_t = biased_scores(tile, slot.place, block, loaded, OPTIONS, LAYOUTS.scores)
        # Loads of queries may stand behind those of the mask until a product has them.
        if OPTIONS.FREE_Q and OPTIONS.MASK:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        qk = warpgroup_mma_wait(0, deps=(qk_t,))
        # not the slot itself: Triton 3.6 does not carry a name through a loop that starts as an alias of another one
        previous = slot.place + 0
        slot = next_slot(slot, OPTIONS.STAGES)
        if OPTIONS.SPLIT_RELEASE:
            mbarrier.arrive(memory.k_empty.index(previous), count=1)
        if OPTIONS.ONE_RING and skips_blocks(OPTIONS):  # V of the last of these blocks
            slot = hand_back(gl.minimum(blocks.last - own.last, 1), memory, slot, OPTIONS)
        if OPTIONS.SOFTCAP:
            qk = tanh(qk * scaling.bend)
        qk = add_biases(qk, block, loaded, bias, no_acc, OPTIONS, LAYOUTS.scores)
        bounds = row_bounds(row, sequence, ROWS, OPTIONS, LAYOUTS.rows)
        qk = hide(qk, bounds, start * BLOCK_N, OPTIONS, LAYOUTS.scores)
        # [64, BLOCK_N], its sums [64, 4]
        if OPTIONS.MASK == 2:
            p, top, factor, sums = first_natural_softmax(qk, no_acc, scales, LAYOUTS.scores)
        else:
            distance = None
            if OPTIONS.LINES:
                distance = distance_of_block(column, line.slope, bias)
            p, top, factor, sums = first_softmax(qk, no_acc, scales, LAYOUTS.scores, distance)
        p = dropped(p, kept, OPTIONS.DROPOUT, LAYOUTS.scores)
        loaded = loaded_of_block(bias, gl.maximum(own.last - 1, 0) * BLOCK_N, OPTIONS, LAYOUTS.scores)
        if OPTIONS.EARLY_P:
            p = gl.convert_layout(p.to(memory.q[0].dtype), LAYOUTS.p)
        # [64, head_dim_v]
        acc = no_sums(ROWS, WIDTH, OPTIONS.V_PANELS, LAYOUTS)
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        state = State(acc=acc, p=p, factor=factor, top=top, sums=sums, loaded=loaded)

        # steps 1 ..
        seen = mask_bounds(bounds, row, sequence, ROWS, OPTIONS)
        state, slot, previous = walk_blocks(tile, seen, slot, previous, state, start, own, OPTIONS, LAYOUTS)
        if OPTIONS.ONE_RING and OPTIONS.LEFT:  # K of the first block that these rows do not see
            slot = hand_back(gl.minimum(own.first - blocks.first, 1), memory, slot, OPTIONS)
            mbarrier.wait(memory.full.index(slot.place), slot.parity)

        # [64, head_dim_v], last step: the second product alone
        acc = rescaled(state.acc, state.factor, LAYOUTS)
        p = state.p
        if not OPTIONS.EARLY_P:
            p = gl.convert_layout(p.to(memory.q[0].dtype), LAYOUTS.p)
        acc_t = add_product(p, memory.v, slot.place, acc, LAYOUTS)
        sink = None
        if tensors.sinks is not None:
            sink = sink_of(tensors.sinks, head)  # on its way during the product
        release_values(memory, previous, OPTIONS)
        if not OPTIONS.SHARE_O and not OPTIONS.FREE_Q:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        q_parity ^= 1
        if not RECEIVES_LAST:
            number, tile_slot = receive(memory.ring, tile_slot)
        # [64]
        total = row_sums(state.sums, state.top, sink, scales, LAYOUTS.rows)
        acc = finished(acc_t)
        release(memory, slot.place, OPTIONS)
        slot = next_slot(slot, OPTIONS.STAGES)
        if OPTIONS.LEFT:  # blocks wholly left of what these rows see
            slot = hand_back(unseen_slots(own.first - blocks.first, OPTIONS.ONE_RING), memory, slot, OPTIONS)
        if RECEIVES_LAST:  # the tile is fetched when all copies have been issued, and these wait for the slots
            number, tile_slot = receive(memory.ring, tile_slot)
        if row < sequence.seqlen_q:
            divisor = total
            if OPTIONS.DROPOUT:
                divisor = total * biases.kept_share
            head_o = output_head(head, part.number, OPTIONS.KEY_PARTS)
            rows = HeadRows(tensors.o, batch, head_o, sequence.begin_q, sequence.seqlen_q)
            send_output(acc, divisor, rows, row, memory, C, OPTIONS, LAYOUTS)
            if tensors.lse is not None:
                at = place.to(gl.int64) * sizes.lse_rows
                if VARLEN:
                    at = head.to(gl.int64) * sizes.lse_rows + sequence.begin_q
                # [64]
                own_rows = row + gl.arange(0, ROWS, LAYOUTS.rows)
                lse = log_sum_exp(state.top, total, sink, scales, LAYOUTS.rows, OPTIONS.MASK == 2)
                gl.store(tensors.lse + at + own_rows, lse, mask=own_rows < sequence.seqlen_q)
        if OPTIONS.SHARE_O:  # the output has left, and the next Q may come
            tma.store_wait(0)
            mbarrier.arrive(memory.q_empty.index(C), count=1)
    tma.store_wait(0)
