"""Attention forward of 8-bit tensors on Hopper, in Gluon: the warps of kernels/hopper/fp8/kernel.py.

The pipeline is that of kernels/hopper/forward/consumer.py, whose header says what makes it fast and why nothing hangs:
one producer warp, two to four warpgroups of 64 query rows, persistent blocks, one barrier a step. Here there are no
windows, no packed sequences and no panels. Numbers have scales, and values come transposed from a pass of their own, or
the warps of kernels/hopper/fp8/turn_values.py transpose them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import locate, reinterpret
from blocktune.kernels.hopper.common.head_rows import HeadRows
from blocktune.kernels.hopper.common.rows import by_thread, thread_sum
from blocktune.kernels.hopper.common.sequences import hide, key_range, mask_bounds, row_bounds, whole_sequence
from blocktune.kernels.hopper.common.slots import fetch, first_slot, next_slot, receive
from blocktune.kernels.hopper.forward.consumer import skips_blocks
from blocktune.kernels.hopper.forward.copies import load_rows, store_rows
from blocktune.kernels.hopper.forward.output import divided
from blocktune.kernels.hopper.fp8.arguments import State, Tile
from blocktune.kernels.hopper.fp8.slots import announce, await_pass, await_slot, give_back, hand_back, next_place
from blocktune.kernels.hopper.fp8.steps import (
    add_values,
    as_operand,
    finished,
    packed,
    queries,
    rescaled,
    scale_of,
    scores,
    softmax,
    step,
)
from blocktune.kernels.hopper.fp8.sums import (
    end_stretch,
    is_one_stretch,
    no_stretches,
    stretch_of,
    sum_of_stretches,
    sums_are_shared,
    sums_are_split,
)
from blocktune.kernels.hopper.fp8.turn_values import load_values


@gluon.jit
def producer(tensors, memory, sizes, OPTIONS: gl.constexpr):
    """Copy Q, K and V of every tile of this block, and fetch its next tiles from the counter."""
    ROWS: gl.constexpr = 64
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    # causal tiles differ in length: those fetched late leave less to the busiest block; narrower heads gain nothing
    LATE: gl.constexpr = OPTIONS.RIGHT and memory.v.shape[1] == 256
    K_BYTES: gl.constexpr = tensors.k.block_type.nbytes
    V_BYTES: gl.constexpr = memory.v.shape[1] * BLOCK_N
    counter, num_heads = tensors.counter, sizes.num_heads
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    place = gl.to_tensor(0)
    q_parity = 1
    tile_slot = first_slot(1)
    tile = gl.program_id(0)
    while tile < q_tiles * sizes.batch_heads:
        m, batch_head = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, OPTIONS.RIGHT)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        q_rows = HeadRows(tensors.q, batch, head, 0, sizes.seqlen_q)
        k_rows = HeadRows(tensors.k, batch, head_kv, 0, sizes.seqlen_k)
        v_rows = HeadRows(tensors.v, batch, head_kv, 0, sizes.seqlen_k)
        blocks = key_range(m * BLOCK_M, whole_sequence(sizes), BLOCK_M, OPTIONS)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(memory.q_empty.index(c), q_parity)
            q_full = memory.q_full.index(c)
            mbarrier.expect(q_full, tensors.q.block_type.nbytes)
            load_rows(q_rows, m * BLOCK_M + c * ROWS, q_full, memory.q, c)
            if c == 0:  # right after the first Q
                await_slot(place, CONSUMERS)
                first_full, _ = announce(memory, place, K_BYTES, 0)
                load_rows(k_rows, blocks.last * BLOCK_N, first_full, memory.k, place)
        q_parity ^= 1
        place = next_place(place, STAGES)
        if not LATE:
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
        if memory.raw_full is None:
            await_pass()
        for i in range(blocks.last - blocks.first):  # steps 1 .. : K of a block and V of the one before
            row = (blocks.last - 1 - i) * BLOCK_N
            await_slot(place, CONSUMERS)
            full, v_full = announce(memory, place, K_BYTES, V_BYTES)
            load_rows(k_rows, row, full, memory.k, place)
            load_values(v_rows, row + BLOCK_N, v_full, memory, place)
            place = next_place(place, STAGES)
        await_slot(place, CONSUMERS)  # the last step: V alone
        _, last_full = announce(memory, place, 0, V_BYTES)
        load_values(v_rows, blocks.first * BLOCK_N, last_full, memory, place)
        place = next_place(place, STAGES)
        if LATE:
            tile, tile_slot = fetch(counter, memory.ring, tile_slot)
    for left in gl.static_range(STAGES):  # no named barrier is left half full
        await_slot(left, CONSUMERS)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)


@gluon.jit
def consumer(tensors, memory, scales, sizes, C: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute rows 64 C .. 64 C + 63 of every tile of this block."""
    ROWS: gl.constexpr = 64
    LN_2: gl.constexpr = 0.6931471805599453
    NOTHING_SEEN: gl.constexpr = -1e30  # below all scores, and finite: -inf minus -inf would be NaN
    WIDTH: gl.constexpr = memory.v.shape[1]
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    STRETCH: gl.constexpr = stretch_of(BLOCK_N, OPTIONS.ONE_STRETCH)
    # split sums take long: one warpgroup ends its stretches in the middle of the other one's, whose products go on
    AHEAD: gl.constexpr = STRETCH // 2 * C if sums_are_split(WIDTH) and not OPTIONS.ONE_STRETCH else 0
    SHARED: gl.constexpr = sums_are_shared(CONSUMERS, WIDTH) or OPTIONS.ONE_STRETCH
    SUM: gl.constexpr = tensors.o.dtype if sums_are_split(WIDTH) else gl.float32
    THREADS_ADD: gl.constexpr = memory.shares is None
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    dtype: gl.constexpr = memory.q[0].dtype
    # [64, head_dim_v] of the output, and [head_dim_v, 64] of sums
    out = reinterpret(memory.o[0].index(C), tensors.o.dtype, [ROWS, WIDTH], memory.o[0].layout)
    kept = out
    if SHARED and not OPTIONS.ONE_STRETCH:
        kept = reinterpret(memory.o[0].index(C), SUM, [WIDTH, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    num_heads = sizes.num_heads
    q_tiles = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    # [64, BLOCK_N]
    no_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, S_L)
    slot = first_slot(0)
    q_parity = 0
    tile_slot = first_slot(0)
    STAGES: gl.constexpr = OPTIONS.STAGES
    for place in gl.static_range(STAGES):  # empty from the beginning
        give_back(place, CONSUMERS)
    number = gl.program_id(0)
    while number < q_tiles * sizes.batch_heads:
        m, batch_head = locate(number, q_tiles, sizes.head_group, sizes.batch_heads, OPTIONS.RIGHT)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        row = m * BLOCK_M + C * ROWS
        scale = scales.log2 * scale_of(scales.q, scales.qb, scales.qh, batch, head)
        scale *= scale_of(scales.k, scales.kb, scales.kh, batch, head_kv)
        out_scale = scale_of(scales.v, scales.vb, scales.vh, batch, head_kv)
        sequence = whole_sequence(sizes)
        blocks = key_range(m * BLOCK_M, sequence, BLOCK_M, OPTIONS)
        own_last = key_range(row, sequence, ROWS, OPTIONS).last
        if skips_blocks(OPTIONS):  # blocks wholly right of what these rows see
            slot = hand_back(blocks.last - own_last, memory, slot, OPTIONS)

        # [64, BLOCK_N], step 0: the scores of the first block
        mbarrier.wait(memory.q_full.index(C), q_parity)
        q_parity ^= 1
        q = queries(memory.q[0].index(C), OPTIONS.Q_REGISTERS, S_L)
        if OPTIONS.Q_REGISTERS:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        qk_t = scores(q, memory.k[0], slot.place, no_acc)
        qk = warpgroup_mma_wait(0, deps=(qk_t,))
        # not the slot itself: Triton 3.6 does not carry a name through a loop that starts as an alias of another one
        previous = slot.place + 0
        slot = next_slot(slot, OPTIONS.STAGES)
        bounds = row_bounds(row, sequence, ROWS, OPTIONS, ROW_S)
        qk = hide(qk, bounds, own_last * BLOCK_N, OPTIONS, S_L)
        # [64, 4]
        nothing = thread_sum(by_thread(no_acc))
        p, _, base, sums = softmax(qk, nothing + NOTHING_SEEN, nothing, scale, THREADS_ADD)
        # [64, head_dim_v]
        acc = gl.zeros([ROWS, WIDTH], gl.float32, O_L)
        whole = no_stretches(WIDTH, SHARED, O_L)
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        state = State(due=nothing + 1.0, acc=acc, p=packed(p), factor=nothing + 1.0, base=base, sums=sums)
        seen = mask_bounds(bounds, row, sequence, ROWS, OPTIONS)
        tile = Tile(memory=memory, q=q, seen=seen, scale=scale, no_acc=no_acc)

        # steps 1 ..: the scores of this block beside the second product of the one before, which has this number
        end = own_last - blocks.first + AHEAD
        for begin in range(0, end + 1, STRETCH):
            if not is_one_stretch(STRETCH):
                if begin > 0:
                    whole, state = end_stretch(kept, whole, state, nothing + 1.0, begin == STRETCH, SHARED, O_L)
            for step_number in range(gl.maximum(begin, AHEAD), gl.minimum(begin + STRETCH, end)):
                column = (own_last - 1 + AHEAD - step_number) * BLOCK_N
                state, slot, previous = step(tile, state, slot, previous, column, OPTIONS, S_L, O_L)

        # [64, head_dim_v], last step: the second product alone
        due, acc = rescaled(state.due, state.acc, state.factor, O_L)
        products = add_values(as_operand(state.p, dtype, P_L), memory, slot.place, acc)
        give_back(previous, CONSUMERS)
        if not OPTIONS.Q_REGISTERS:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        number, tile_slot = receive(memory.ring, tile_slot)
        acc, sums = finished(products, state.sums, state.factor, THREADS_ADD)
        # [64]
        total = gl.convert_layout(gl.sum(sums, 1), ROW_S)
        give_back(slot.place, CONSUMERS)
        slot = next_slot(slot, OPTIONS.STAGES)
        if row < sizes.seqlen_q:
            # [64, head_dim_v]
            total_acc = sum_of_stretches(kept, whole, due, acc, end, STRETCH, SHARED, O_L)
            tma.store_wait(0)
            out.store(divided(total_acc * out_scale, total, OPTIONS.ALIGNED, O_L).to(tensors.o.dtype))
            fence_async_shared()
            store_rows(HeadRows(tensors.o, batch, head, 0, sizes.seqlen_q), row, memory.o, C)
            if tensors.lse is not None:
                # [64]
                rows = row + gl.arange(0, ROWS, ROW_S)
                start = batch_head.to(gl.int64) * sizes.seqlen_q
                own_base = gl.convert_layout(gl.max(state.base, 1), ROW_S)
                gl.store(tensors.lse + start + rows, (own_base + gl.log2(total)) * LN_2, mask=rows < sizes.seqlen_q)
    tma.store_wait(0)
