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
8. In a fixed order of additions (`adder`) a warp of its own waits for the tile's turn, adds dQ and passes the turn on.
9. Hardware's named barriers may replace mbarriers between the warpgroups (NAMED, bit 0: exchange of dS, bit 1: release
   of a stage), because an mbarrier's arrival costs one more barrier of the warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper.backward.arguments import Bounds, Ends, Memory, Options, Sizes, Steps
from blocktune.kernels.hopper.backward.bounds import (
    await_turn,
    bounds_of,
    copy_rows,
    copy_rows_out,
    count_key_tiles,
    first_row,
    locate_keys,
    next_tile,
    pass_turn,
    query_range,
    sequence,
    turn_of,
)
from blocktune.kernels.hopper.backward.form import (
    counts_all_tiles,
    has_last_masks,
    has_masks,
    is_general,
    is_ordered,
    names_release,
)
from blocktune.kernels.hopper.backward.steps import (
    add_out,
    give_dq,
    issue_dq,
    no_products_yet,
    put_partial,
    step,
    wait_ds,
)
from blocktune.kernels.hopper.common.device_functions import advance, as_block, copy_in, reinterpret
from blocktune.kernels.hopper.common.named_barriers import bar_sync
from blocktune.kernels.hopper.common.slots import (
    new_barriers,
    new_tile_numbers,
    new_tile_ring,
    open_slot,
    publish,
    receive,
)

SIZES = ("seqlen_q", "seqlen_k", "num_heads_kv", "group_size", "batch_heads", "head_group")
"""Run-time integers that are not compiled in."""
BOUNDS = ("rows", "upper", "lower")
"""More of them, None in the plain form: rows of a head (packed) or of a head and batch entry in the workspace, and
between which keys a query i sees: i + lower and i + upper."""


@gluon.jit
def head_row(
    batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, rows, BLOCK_M: gl.constexpr, GROUPED: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Where the query head number `member` of a key head begins in the workspace, in rows."""
    if is_general(FORM):
        head = batch_head % num_heads_kv * group_size + member
        return first_row(batch_head // num_heads_kv, head, begin_q, num_heads_kv * group_size, rows, BLOCK_M, FORM)
    elif GROUPED:
        return (batch_head * group_size + member) * seqlen_q
    else:
        return batch_head * seqlen_q


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, ends, counter, sizes, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Copies K and V of every tile of this block, Q, dO and their statistics of every step; fetches the next tiles."""
    STAGES: gl.constexpr = OPTIONS.STAGES
    CAUSAL: gl.constexpr = OPTIONS.CAUSAL
    NAMED: gl.constexpr = OPTIONS.NAMED
    PERSISTENT: gl.constexpr = OPTIONS.PERSISTENT
    FORM: gl.constexpr = OPTIONS.FORM
    PARTS: gl.constexpr = OPTIONS.PARTS
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    ROW_BYTES: gl.constexpr = q_desc.block_type.nbytes + lse_desc.block_type.nbytes
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = count_key_tiles(seqlen_k, BLOCK_N, FORM)
    slot = 0
    phase = 1
    kv_phase = 1
    tile_slot = 0
    tile_phase = 1
    issued = 0
    if counts_all_tiles(FORM):
        tile = next_tile(counter, key_tiles, sizes, BLOCK_N, CAUSAL, FORM)
        tile_slot, tile_phase = publish(tile, ends.ring, tile_slot, tile_phase)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, CAUSAL, FORM)
        batch = batch_head // num_heads_kv
        head_kv = batch_head % num_heads_kv
        first = 0
        end = seqlen_q
        begin_q = 0
        begin_k = 0
        len_q = seqlen_q
        len_k = seqlen_k
        if is_general(FORM):
            begin_q, len_q = sequence(sizes.cu_q, batch, seqlen_q, FORM)
            begin_k, len_k = sequence(sizes.cu_k, batch, seqlen_k, FORM)
            above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, FORM)
            first, _low, _high, end, _seen = query_range(
                n * BLOCK_N, len_q, len_k, above, below, BLOCK_M, BLOCK_N, FORM
            )  # fmt: skip
        elif CAUSAL:
            first = n * BLOCK_N
        for member in range(group_size):
            head = head_kv * group_size + member
            stat_row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, FORM
            )  # fmt: skip
            for m in range(first, end, BLOCK_M):
                if names_release(NAMED):
                    if issued >= STAGES:
                        bar_sync(12 + slot, 288)
                else:
                    mbarrier.wait(memory.empty.index(slot), phase)
                mbarrier.expect(memory.q_full.index(slot), ROW_BYTES)
                q_tile = as_block(q_desc, memory.q.index(slot))
                copy_rows(q_desc, batch, head, m, 0, begin_q, len_q, memory.q_full.index(slot), q_tile, FORM)
                copy_in(lse_desc, [stat_row + m], memory.q_full.index(slot), memory.lse.index(slot))
                if (m == first) & (member == 0):  # right behind the first Q
                    mbarrier.wait(ends.kv_empty, kv_phase)
                    mbarrier.expect(ends.kv_full, 2 * k_desc.block_type.nbytes)
                    k_tile = as_block(k_desc, memory.k)
                    copy_rows(
                        k_desc, batch, head_kv // PARTS, n * BLOCK_N, 0, begin_k, len_k, ends.kv_full, k_tile, FORM
                    )
                    v_tile = as_block(v_desc, memory.v)
                    copy_rows(
                        v_desc, batch, head_kv // PARTS, n * BLOCK_N, 0, begin_k, len_k, ends.kv_full, v_tile, FORM
                    )
                    kv_phase ^= 1
                mbarrier.expect(memory.do_full.index(slot), ROW_BYTES)
                do_tile = as_block(do_desc, memory.do.index(slot))
                copy_rows(do_desc, batch, head, m, 0, begin_q, len_q, memory.do_full.index(slot), do_tile, FORM)
                copy_in(delta_desc, [stat_row + m], memory.do_full.index(slot), memory.delta.index(slot))
                slot, phase = advance(slot, phase, STAGES)
                issued += 1
        if PERSISTENT:
            tile = next_tile(counter, key_tiles, sizes, BLOCK_N, CAUSAL, FORM)
            tile_slot, tile_phase = publish(tile, ends.ring, tile_slot, tile_phase)
        else:
            tile = key_tiles * batch_heads
    if names_release(NAMED):  # take the last releases, so that no named barrier is left half full
        if issued < STAGES:
            slot = 0
        for i in range(gl.minimum(STAGES, issued)):
            bar_sync(12 + slot, 288)
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def query_head(
    steps, ka, va, kt, dk, dv, n0, row, first, low, high, end, bounds, slot, phase, b, b_phase,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of one head that see the keys from n0 on; row: of its first query in dQ.

    From `low` to `high` every query sees every key.
    """
    memory = steps.memory
    CAUSAL: gl.constexpr = OPTIONS.CAUSAL
    DEFER: gl.constexpr = OPTIONS.DEFER
    NAMED: gl.constexpr = OPTIONS.NAMED
    FORM: gl.constexpr = OPTIONS.FORM
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    if CAUSAL and not is_general(FORM):
        first = n0 + 0
        low = n0 + BLOCK_N
    if CAUSAL or has_masks(FORM):
        for m in range(first, low, BLOCK_M):
            dk, dv, slot, phase, b, b_phase = step(
                steps, ka, va, kt, dk, dv, m, first, n0, row, bounds, slot, phase, b, b_phase,
                W, True, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
    for m in range(low, high, BLOCK_M):
        dk, dv, slot, phase, b, b_phase = step(
            steps, ka, va, kt, dk, dv, m, first, n0, row, bounds, slot, phase, b, b_phase,
            W, False, OPTIONS, S_L, KV_L, DQ_L,
        )  # fmt: skip
    if has_last_masks(FORM):
        for m in range(high, end, BLOCK_M):
            dk, dv, slot, phase, b, b_phase = step(
                steps, ka, va, kt, dk, dv, m, first, n0, row, bounds, slot, phase, b, b_phase,
                W, True, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
    if DEFER:
        wait_ds(memory.ds_full, 1 - b, b_phase ^ (1 - b), W, NAMED)
        dq_t = issue_dq(kt, memory.k, memory.ds.index(1 - b), W, DEFER, DQ_L)
        dq = warpgroup_mma_wait(0, deps=(dq_t,))
        give_dq(dq, steps, row + end - BLOCK_M, b, W, FORM)
    return dk, dv, slot, phase, b, b_phase


@gluon.jit
def consumer(
    steps, dk_desc, dv_desc, ends, scale, sizes, W: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dK and dV of keys 64 W .. 64 W + 63 of every tile of this block, and a half of the tile's part of dQ.

    GROUPED: several query heads share the keys; their gradients are summed in registers.
    """
    memory = steps.memory
    DEFER: gl.constexpr = OPTIONS.DEFER
    PERSISTENT: gl.constexpr = OPTIONS.PERSISTENT
    FORM: gl.constexpr = OPTIONS.FORM
    dtype: gl.constexpr = memory.k.dtype
    D: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    KEYS: gl.constexpr = BLOCK_N // 2
    DQ_N: gl.constexpr = BLOCK_M // 2 if DEFER else D // 2
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DQ_N, 16])
    # [KEYS, head_dim]
    staging = reinterpret(memory.dq.index(W), dtype, [KEYS, D], GRADIENT_L)  # dV and dK leave where dQ does
    kw = memory.k.slice(W * KEYS, KEYS, dim=0)
    vw = memory.v.slice(W * KEYS, KEYS, dim=0)
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = count_key_tiles(seqlen_k, BLOCK_N, FORM)
    slot = 0
    phase = 0
    b = 0
    b_phase = 0
    kv_phase = 0
    tile_slot = 0
    tile_phase = 0
    if DEFER:
        no_products_yet()
    if counts_all_tiles(FORM):
        tile, tile_slot, tile_phase = receive(ends.ring, tile_slot, tile_phase)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS.CAUSAL, FORM)
        n0 = n * BLOCK_N
        first = 0
        low = 0
        high = seqlen_q
        end = seqlen_q
        begin_q = 0
        begin_k = 0
        len_k = seqlen_k
        bounds = None
        if is_general(FORM):
            begin_q, len_q = sequence(sizes.cu_q, batch_head // num_heads_kv, seqlen_q, FORM)
            begin_k, len_k = sequence(sizes.cu_k, batch_head // num_heads_kv, seqlen_k, FORM)
            above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, FORM)
            first, low, high, end, _seen = query_range(n0, len_q, len_k, above, below, BLOCK_M, BLOCK_N, FORM)
            bounds = Bounds(upper=above, lower=below, queries=len_q, keys=len_k)
        # [KEYS, head_dim]
        dk = gl.zeros([KEYS, D], gl.float32, KV_L)
        dv = gl.zeros([KEYS, D], gl.float32, KV_L)
        mbarrier.wait(ends.kv_full, kv_phase)
        kv_phase ^= 1
        if DEFER:
            ka = kw.load(gl.DotOperandLayout(0, S_L, 2))
            va = vw.load(gl.DotOperandLayout(0, S_L, 2))
            kt = memory.k.permute((1, 0)).load(gl.DotOperandLayout(0, DQ_L, 2))
            if PERSISTENT:
                mbarrier.arrive(ends.kv_empty, count=1)  # K and V are in registers now
        else:
            ka = kw
            va = vw
            kt = memory.k
        if OPTIONS.GROUPED:
            for member in range(group_size):
                row = head_row(
                    batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, FORM
                )  # fmt: skip
                dk, dv, slot, phase, b, b_phase = query_head(
                    steps, ka, va, kt, dk, dv, n0, row, first, low, high, end, bounds, slot, phase, b, b_phase,
                    W, OPTIONS, S_L, KV_L, DQ_L,
                )  # fmt: skip
        else:
            row = head_row(batch_head, 0, num_heads_kv, 1, begin_q, seqlen_q, sizes.rows, BLOCK_M, False, FORM)
            dk, dv, slot, phase, b, b_phase = query_head(
                steps, ka, va, kt, dk, dv, n0, row, first, low, high, end, bounds, slot, phase, b, b_phase,
                W, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
        if PERSISTENT:
            if not DEFER:
                mbarrier.arrive(ends.kv_empty, count=1)
            tile, tile_slot, tile_phase = receive(ends.ring, tile_slot, tile_phase)
        else:
            tile = key_tiles * batch_heads
        batch = batch_head // num_heads_kv
        head = batch_head % num_heads_kv
        key = n0 + W * KEYS
        if is_ordered(FORM):
            mbarrier.wait(memory.dq_empty.index(W), 1 - b)  # the tile's last dQ has left
        # [KEYS, head_dim]
        if OPTIONS.PARTS > 1:
            block = (batch_head * key_tiles + n) * 2 + W
            put_partial(dv, dv_desc, memory.dq.index(W), block)
            put_partial(dk, dk_desc, memory.dq.index(W), block)
        else:
            tma.store_wait(0)
            staging.store(dv.to(dtype))
            fence_async_shared()
            copy_rows_out(dv_desc, batch, head, key, 0, begin_k, len_k, as_block(dv_desc, staging), FORM)
            dk = dk * scale
            tma.store_wait(0)
            staging.store(dk.to(dtype))
            fence_async_shared()
            copy_rows_out(dk_desc, batch, head, key, 0, begin_k, len_k, as_block(dk_desc, staging), FORM)
    tma.store_wait(0)


@gluon.jit
def adder(dq_desc, memory, ends, sizes, turns, OPTIONS: gl.constexpr):
    """In a fixed order: adds dQ of every step to the sums when it is the tile's turn.

    The warpgroups would wait for turns, and for the memory that a turn is passed on by, once or twice in every step. A
    turn that is passed on one step later, when its additions are complete without a wait, is too late where all tiles
    begin with the same queries: on an H200 16 % slower with every key seen, and no faster under a diagonal.
    """
    FORM: gl.constexpr = OPTIONS.FORM
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    HALF: gl.constexpr = dq_desc.block_type.shape[0]
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = count_key_tiles(seqlen_k, BLOCK_N, FORM)
    parity = 0
    tile_slot = 0
    tile_phase = 0
    tile, tile_slot, tile_phase = receive_alone(ends.ring, tile_slot, tile_phase)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS.CAUSAL, FORM)
        begin_q, len_q = sequence(sizes.cu_q, batch_head // num_heads_kv, seqlen_q, FORM)
        _begin_k, len_k = sequence(sizes.cu_k, batch_head // num_heads_kv, seqlen_k, FORM)
        above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, FORM)
        first, _low, _high, end, seen = query_range(n * BLOCK_N, len_q, len_k, above, below, BLOCK_M, BLOCK_N, FORM)
        bounds = Bounds(upper=above, lower=below, queries=len_q, keys=len_k)
        for member in range(group_size):
            row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, FORM
            )  # fmt: skip
            for m in range(first, end, BLOCK_M):
                block = (row + m) // BLOCK_M
                count = turn_of(n, m, bounds, seen, BLOCK_M, BLOCK_N, 1, FORM)
                await_turn(turns + block, count)
                for half in gl.static_range(2):
                    mbarrier.wait(memory.dq_full.index(half), parity)
                    add_out(dq_desc, [(block * 2 + half) * HALF, 0], memory.dq.index(half))
                tma.store_wait(0)
                for half in gl.static_range(2):
                    mbarrier.arrive(memory.dq_empty.index(half), count=1)
                pass_turn(turns + block, count)
                parity ^= 1
        tile, tile_slot, tile_phase = receive_alone(ends.ring, tile_slot, tile_phase)


@gluon.jit
def receive_alone(ring, place, parity):
    """As `receive`, for one warp."""
    mbarrier.wait(ring.full.index(place), parity)
    tile = ring.numbers.index(place).load(gl.BlockedLayout([1], [32], [1], [0])).item()
    mbarrier.arrive(ring.empty.index(place), count=1)
    place, parity = advance(place, parity, 2)
    return tile, place, parity


@gluon.jit(do_not_specialize=[*SIZES, *BOUNDS])
def flash_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, scale, scale_log2,
    seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group, rows, upper, lower, cap_in, cu_q, cu_k,
    turns,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPED: gl.constexpr, DEFER: gl.constexpr,
    FOLD_LSE: gl.constexpr, FOLD_DELTA: gl.constexpr, NAMED: gl.constexpr, PERSISTENT: gl.constexpr,
    FORM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Descriptors of q, dout (blocks of 64 rows), k, v (128), dk and dv (64), of the float32 sums of dq in register
    order, and of lse (base 2) and delta [batch, num_heads, seqlen_q]; counter: an int32 zero. scale_log2: the softmax
    scale times log2(e). batch_heads: batch * num_heads_kv.

    What the plain FORM has no use for is None: the integers of BOUNDS, cu_q and cu_k (where packed sequences begin),
    turns (int32 zeros, one for every half of 64 rows of the workspace), and with a soft cap cap_in = 2 log2(e) scale /
    softcap, when scale_log2 is softcap times log2(e).

    PARTS: in how many parts the query heads that share keys are walked along. Above 1 num_heads_kv, group_size,
    batch_heads and head_group are those of parts, and dk_desc and dv_desc describe float32 rows as dq_desc does: each
    part leaves gradients of its own, which `join_parts_kernel` adds up.
    """
    dtype: gl.constexpr = q_desc.dtype
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[RANK - 2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[RANK - 2]
    D: gl.constexpr = q_desc.block_type.shape[RANK - 1]
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # a half of the queries of dS is a whole panel of the swizzle
    DS_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64 if DEFER else 128, element_bitwidth=16, rank=2)
    # [BLOCK_N, head_dim]
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    # [STAGES, BLOCK_M, head_dim]
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    # [2, BLOCK_N, BLOCK_M]
    ds_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], DS_L)
    # [2, a part of BLOCK_M * head_dim]
    dq_smem = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)  # noqa: RUF005
    # [STAGES, BLOCK_M]
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    tile_numbers = new_tile_numbers()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    memory = Memory(
        k=k_smem,
        v=v_smem,
        q=q_smem,
        do=do_smem,
        lse=lse_smem,
        delta=delta_smem,
        ds=ds_smem,
        dq=dq_smem,
        q_full=new_barriers(STAGES),
        do_full=new_barriers(STAGES),
        empty=new_barriers(STAGES),
        ds_full=new_barriers(2),
        dq_full=new_barriers(2) if is_ordered(FORM) else None,
        dq_empty=new_barriers(2) if is_ordered(FORM) else None,
    )
    ends = Ends(kv_full=kv_full, kv_empty=kv_empty, ring=new_tile_ring(tile_numbers))
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.q_full.index(i), count=1)
        open_slot(memory.do_full, memory.empty, i, 2)
    for i in gl.static_range(2):
        mbarrier.init(memory.ds_full.index(i), count=2)
        open_slot(ends.ring.full, ends.ring.empty, i, 3 if is_ordered(FORM) else 2)
        if is_ordered(FORM):
            open_slot(memory.dq_full, memory.dq_empty, i, 1)
    fence_async_shared()
    steps = Steps(dq_desc=dq_desc, memory=memory, scale_log2=scale_log2, cap_in=cap_in)
    sizes = Sizes(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_kv=num_heads_kv,
        group_size=group_size,
        batch_heads=batch_heads,
        head_group=head_group,
        rows=rows,
        upper=upper,
        lower=lower,
        cu_q=cu_q,
        cu_k=cu_k,
    )
    OPTIONS: gl.constexpr = Options(
        STAGES=STAGES,
        CAUSAL=CAUSAL,
        GROUPED=GROUPED,
        DEFER=DEFER,
        FOLD_LSE=FOLD_LSE,
        FOLD_DELTA=FOLD_DELTA,
        NAMED=NAMED,
        PERSISTENT=PERSISTENT,
        FORM=FORM,
        PARTS=PARTS,
    )
    if is_ordered(FORM):
        gl.warp_specialize([
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 0, OPTIONS)),
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 1, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, ends, counter, sizes, OPTIONS)),
            (adder, (dq_desc, memory, ends, sizes, turns, OPTIONS)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 0, OPTIONS)),
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 1, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, ends, counter, sizes, OPTIONS)),
        ], [4, 1], [240, 24])  # fmt: skip
