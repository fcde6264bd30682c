"""Attention forward of 8-bit tensors on Hopper, in Gluon: the warps of kernels/hopper/fp8/kernel.py.

The pipeline is that of kernels/hopper/forward/consumer.py, whose header says what makes it fast and why nothing hangs:
one producer warp, two to four warpgroups of 64 query rows, persistent blocks, one barrier a step. Here there are no
windows, no packed sequences and no panels. Numbers have scales, and values come transposed from a pass of their own, or
the warps of kernels/hopper/fp8/turn_values.py transpose them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper.common.device_functions import advance, locate, reinterpret
from blocktune.kernels.hopper.common.rows import by_thread, thread_sum
from blocktune.kernels.hopper.common.slots import fetch, receive
from blocktune.kernels.hopper.forward.bounds import hide, key_range, row_bounds
from blocktune.kernels.hopper.forward.copies import load_rows, store_rows
from blocktune.kernels.hopper.forward.output import divided
from blocktune.kernels.hopper.fp8.slots import announce, await_pass, await_slot, following, give_back, hand_back
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
def producer(q_desc, k_desc, v_desc, memory, counter, sizes, OPTIONS: gl.constexpr):
    """Copies Q, K and V of every tile of this block, and fetches its next tiles from the counter."""
    ROWS: gl.constexpr = 64
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    # causal tiles differ in length: those fetched late leave less to the busiest block; narrower heads gain nothing
    LATE: gl.constexpr = RIGHT and memory.v.shape[1] == 256
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes
    V_BYTES: gl.constexpr = memory.v.shape[1] * BLOCK_N
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    batch_heads, num_heads = sizes.batch_heads, sizes.num_heads
    q_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    slot = 0
    q_phase = 1
    tile_slot = 0
    tile_phase = 1
    tile = gl.program_id(0)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, sizes.head_group, batch_heads, RIGHT)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        first, last = key_range(m * BLOCK_M, seqlen_q, seqlen_k, sizes.right, 0, BLOCK_M, BLOCK_N, RIGHT, False)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(memory.q_empty.index(c), q_phase)
            q_full = memory.q_full.index(c)
            mbarrier.expect(q_full, q_desc.block_type.nbytes)
            load_rows(q_desc, batch, head, m * BLOCK_M + c * ROWS, 0, seqlen_q, q_full, memory.q, c, 1, False)
            if c == 0:  # right behind the first Q
                await_slot(slot, CONSUMERS)
                first_full, _ = announce(memory, slot, K_BYTES, 0)
                load_rows(k_desc, batch, head_kv, last * BLOCK_N, 0, seqlen_k, first_full, memory.k, slot, 1, False)
        q_phase ^= 1
        slot = following(slot, STAGES)
        if not LATE:
            tile, tile_slot, tile_phase = fetch(counter, memory.ring, tile_slot, tile_phase)
        if memory.raw_full is None:
            await_pass()
        for i in range(last - first):  # steps 1 .. : K of a block and V of the one before
            row = (last - 1 - i) * BLOCK_N
            await_slot(slot, CONSUMERS)
            full, v_full = announce(memory, slot, K_BYTES, V_BYTES)
            load_rows(k_desc, batch, head_kv, row, 0, seqlen_k, full, memory.k, slot, 1, False)
            load_values(v_desc, batch, head_kv, row + BLOCK_N, v_full, memory, slot)
            slot = following(slot, STAGES)
        await_slot(slot, CONSUMERS)  # the last step: V alone
        _, last_full = announce(memory, slot, 0, V_BYTES)
        load_values(v_desc, batch, head_kv, first * BLOCK_N, last_full, memory, slot)
        slot = following(slot, STAGES)
        if LATE:
            tile, tile_slot, tile_phase = fetch(counter, memory.ring, tile_slot, tile_phase)
    for place in gl.static_range(STAGES):  # no named barrier is left half full
        await_slot(place, CONSUMERS)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)


@gluon.jit
def consumer(o_desc, lse, memory, scales, sizes, C: gl.constexpr, OPTIONS: gl.constexpr):
    """Computes rows 64 C .. 64 C + 63 of every tile of this block."""
    ROWS: gl.constexpr = 64
    LN_2: gl.constexpr = 0.6931471805599453
    NOTHING_SEEN: gl.constexpr = -1e30  # below all scores, and finite: -inf minus -inf would be NaN
    WIDTH: gl.constexpr = memory.v.shape[1]
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    STAGES: gl.constexpr = OPTIONS.STAGES
    RAGGED: gl.constexpr = OPTIONS.RAGGED
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    ALIGNED: gl.constexpr = OPTIONS.ALIGNED
    Q_REGISTERS: gl.constexpr = OPTIONS.Q_REGISTERS
    SKIPS: gl.constexpr = RIGHT and not (ALIGNED and BLOCK_M == BLOCK_N)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    STRETCH: gl.constexpr = stretch_of(BLOCK_N, OPTIONS.ONE_STRETCH)
    # split sums take long: one warpgroup ends its stretches in the middle of the other one's, whose products go on
    AHEAD: gl.constexpr = STRETCH // 2 * C if sums_are_split(WIDTH) and not OPTIONS.ONE_STRETCH else 0
    SHARED: gl.constexpr = sums_are_shared(CONSUMERS, WIDTH) or OPTIONS.ONE_STRETCH
    SUM: gl.constexpr = o_desc.dtype if sums_are_split(WIDTH) else gl.float32
    THREADS_ADD: gl.constexpr = memory.shares is None
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    dtype: gl.constexpr = memory.q[0].dtype
    # [64, head_dim_v] of the output, and [head_dim_v, 64] of sums
    out = reinterpret(memory.o[0].index(C), o_desc.dtype, [ROWS, WIDTH], memory.o[0].layout)
    kept = out
    if SHARED and not OPTIONS.ONE_STRETCH:
        kept = reinterpret(memory.o[0].index(C), SUM, [WIDTH, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    seqlen_q, seqlen_k, right = sizes.seqlen_q, sizes.seqlen_k, sizes.right
    batch_heads, num_heads = sizes.batch_heads, sizes.num_heads
    q_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    # [64, BLOCK_N]
    no_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, S_L)
    slot = 0
    phase = 0
    q_phase = 0
    tile_slot = 0
    tile_phase = 0
    for place in gl.static_range(STAGES):  # empty from the beginning
        give_back(place, CONSUMERS)
    tile = gl.program_id(0)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, sizes.head_group, batch_heads, RIGHT)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // sizes.group_size
        row_start = m * BLOCK_M + C * ROWS
        scale = scales.log2 * scale_of(scales.q, scales.qb, scales.qh, batch, head)
        scale *= scale_of(scales.k, scales.kb, scales.kh, batch, head_kv)
        out_scale = scale_of(scales.v, scales.vb, scales.vh, batch, head_kv)
        first, last = key_range(m * BLOCK_M, seqlen_q, seqlen_k, right, 0, BLOCK_M, BLOCK_N, RIGHT, False)
        _, own_last = key_range(row_start, seqlen_q, seqlen_k, right, 0, ROWS, BLOCK_N, RIGHT, False)
        if SKIPS:  # blocks wholly right of what these rows see
            slot, phase = hand_back(last - own_last, memory.full, slot, phase, STAGES, CONSUMERS)

        # [64, BLOCK_N], step 0: the scores of the first block
        mbarrier.wait(memory.q_full.index(C), q_phase)
        q_phase ^= 1
        q = queries(memory.q[0].index(C), Q_REGISTERS, S_L)
        if Q_REGISTERS:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        mbarrier.wait(memory.full.index(slot), phase)
        qk_t = scores(q, memory.k[0], slot, no_acc)
        qk = warpgroup_mma_wait(0, deps=(qk_t,))
        # not `previous = slot`: Triton 3.6 does not carry a name through a loop that starts as an alias of another one
        previous = slot + 0
        slot, phase = advance(slot, phase, STAGES)
        last_seen, first_seen = row_bounds(row_start, seqlen_k, right, 0, ROWS, RAGGED, RIGHT, False, ROW_S)
        qk = hide(qk, last_seen, first_seen, own_last * BLOCK_N, RAGGED or RIGHT, False, S_L)
        # [64, 4]
        nothing = thread_sum(by_thread(no_acc))
        p, _, base, sums = softmax(qk, nothing + NOTHING_SEEN, nothing, scale, THREADS_ADD)
        # [64, head_dim_v]
        acc = gl.zeros([ROWS, WIDTH], gl.float32, O_L)
        whole = no_stretches(WIDTH, SHARED, O_L)
        mbarrier.wait(memory.full.index(slot), phase)
        state = nothing + 1.0, acc, packed(p), nothing + 1.0, base, sums
        # blocks of keys up to the one from `highest` on are wholly visible
        highest = seqlen_k - BLOCK_N
        if RIGHT:
            highest = gl.minimum(seqlen_k, row_start + right + 1) - BLOCK_N
        mask = last_seen, first_seen, highest

        # steps 1 ..: the scores of this block beside the second product of the one before, which has this number
        end = own_last - first + AHEAD
        for begin in range(0, end + 1, STRETCH):
            if not is_one_stretch(STRETCH):
                if begin > 0:
                    whole, state = end_stretch(kept, whole, state, nothing + 1.0, begin == STRETCH, SHARED, O_L)
            for number in range(gl.maximum(begin, AHEAD), gl.minimum(begin + STRETCH, end)):
                state, slot, phase, previous = step(
                    memory, q, state, slot, phase, previous, (own_last - 1 + AHEAD - number) * BLOCK_N, mask, scale,
                    no_acc, OPTIONS, S_L, O_L,
                )  # fmt: skip
        due, acc, p, factor, base, sums = state

        # [64, head_dim_v], last step: the second product alone
        due, acc = rescaled(due, acc, factor, O_L)
        products = add_values(as_operand(p, dtype, P_L), memory, slot, acc)
        give_back(previous, CONSUMERS)
        if not Q_REGISTERS:
            mbarrier.arrive(memory.q_empty.index(C), count=1)
        tile, tile_slot, tile_phase = receive(memory.ring, tile_slot, tile_phase)
        acc, sums = finished(products, sums, factor, THREADS_ADD)
        # [64]
        total = gl.convert_layout(gl.sum(sums, 1), ROW_S)
        give_back(slot, CONSUMERS)
        slot, phase = advance(slot, phase, STAGES)
        if row_start < seqlen_q:
            # [64, head_dim_v]
            total_acc = sum_of_stretches(kept, whole, due, acc, end, STRETCH, SHARED, O_L)
            tma.store_wait(0)
            out.store(divided(total_acc * out_scale, total, ALIGNED, O_L).to(o_desc.dtype))
            fence_async_shared()
            store_rows(o_desc, batch, head, row_start, 0, seqlen_q, memory.o, C, 1, False)
            if lse is not None:
                # [64]
                rows = row_start + gl.arange(0, ROWS, ROW_S)
                start = batch_head.to(gl.int64) * seqlen_q
                own_base = gl.convert_layout(gl.max(base, 1), ROW_S)
                gl.store(lse + start + rows, (own_base + gl.log2(total)) * LN_2, mask=rows < seqlen_q)
    tma.store_wait(0)
