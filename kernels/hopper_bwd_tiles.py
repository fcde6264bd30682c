"""The warps of the Hopper attention backward, in Gluon: one that copies, two warpgroups that compute.

What makes it fast, and is easily lost when the code changes:

1. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T leave the accumulators as
   register operands of dV += P^T dO and dK += dS^T Q.
2. Each warpgroup owns 64 of the 128 keys. They only meet for dS: both write their half of dS^T to shared memory (two
   buffers), and each computes a half of dQ = dS K from the whole: half of the head dimension of 128, or, of head
   dimension 64, half of the queries (dQ^T = K^T dS^T).
3. delta and the log-sum-exp may enter as initial accumulators of dP and S (FOLD_DELTA, FOLD_LSE): fewer registers.
4. dQ is summed over the key tiles in float32 by the copy engine, which adds whole tiles to global memory. They keep the
   order of the accumulator registers: 16-byte stores and one copy a half; `finish_kernel` puts them in order.
5. Head dimension 64 (DEFER): K, V and K^T live in registers, and dQ of a block runs behind S and dP of the next one.
6. Stage indices stay dynamic: with constant ones LLVM hoists all operand addresses out of the loop, and they spill.
7. Blocks are persistent (PERSISTENT), take tiles from a counter, longest first if causal, and copy K, V and the first
   Q and dO of the next tile during the epilogue.
8. Hardware's named barriers may replace mbarriers between the warpgroups (NAMED, bit 0: exchange of dS, bit 1: release
   of a stage), because an mbarrier's arrival costs one more barrier of the warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper_bwd_steps import add_dq, bar_sync, issue_dq, step, wait_ds
from blocktune.kernels.hopper_tiles import advance, as_block, copy_in, copy_out, locate, reinterpret

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

SIZES = ("seqlen_q", "seqlen_k", "num_heads_kv", "group_size", "batch_heads", "head_group")
"""Run-time integers that are not compiled in."""


@gluon.jit
def locate_keys(tile, key_tiles, head_group, batch_heads, CAUSAL: gl.constexpr):
    """(key tile, batch * num_heads_kv + head). Causal: the longest first, which are those of the first keys."""
    n, batch_head = locate(tile, key_tiles, head_group, batch_heads, CAUSAL)
    if CAUSAL:
        n = key_tiles - 1 - n
    return n, batch_head


@gluon.jit
def producer(args, STAGES: gl.constexpr, CAUSAL: gl.constexpr, NAMED: gl.constexpr, PERSISTENT: gl.constexpr):
    """Copies K and V of every tile of this block, Q, dO and their statistics of every step; fetches the next tiles."""
    (
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
        kv_full, kv_empty, q_full, do_full, empty, tile_smem, tile_full, tile_empty, counter,
        seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group,
    ) = args  # fmt: skip
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    ROW_BYTES: gl.constexpr = q_desc.block_type.nbytes + lse_desc.block_type.nbytes
    key_tiles = seqlen_k // BLOCK_N
    slot = 0
    phase = 1
    kv_phase = 1
    tile_slot = 0
    tile_phase = 1
    issued = 0
    tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, head_group, batch_heads, CAUSAL)
        batch = batch_head // num_heads_kv
        head_kv = batch_head % num_heads_kv
        first = 0
        if CAUSAL:
            first = n * BLOCK_N
        for member in range(group_size):
            head = head_kv * group_size + member
            stat_row = (batch_head * group_size + member) * seqlen_q
            for m in range(first, seqlen_q, BLOCK_M):
                if NAMED & 2:
                    if issued >= STAGES:
                        bar_sync(12 + slot, 288)
                else:
                    mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(q_full.index(slot), ROW_BYTES)
                copy_in(q_desc, [batch, head, m, 0], q_full.index(slot), as_block(q_desc, q_smem.index(slot)))
                copy_in(lse_desc, [stat_row + m], q_full.index(slot), lse_smem.index(slot))
                if (m == first) & (member == 0):  # right behind the first Q
                    mbarrier.wait(kv_empty, kv_phase)
                    mbarrier.expect(kv_full, 2 * k_desc.block_type.nbytes)
                    copy_in(k_desc, [batch, head_kv, n * BLOCK_N, 0], kv_full, as_block(k_desc, k_smem))
                    copy_in(v_desc, [batch, head_kv, n * BLOCK_N, 0], kv_full, as_block(v_desc, v_smem))
                    kv_phase ^= 1
                mbarrier.expect(do_full.index(slot), ROW_BYTES)
                copy_in(do_desc, [batch, head, m, 0], do_full.index(slot), as_block(do_desc, do_smem.index(slot)))
                copy_in(delta_desc, [stat_row + m], do_full.index(slot), delta_smem.index(slot))
                slot, phase = advance(slot, phase, STAGES)
                issued += 1
        if PERSISTENT:
            tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            mbarrier.wait(tile_empty.index(tile_slot), tile_phase)
            tile_smem.index(tile_slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(tile_full.index(tile_slot), count=1)
            tile_slot, tile_phase = advance(tile_slot, tile_phase, 2)
        else:
            tile = key_tiles * batch_heads
    if NAMED & 2:  # take the last releases, so that no named barrier is left half full
        if issued < STAGES:
            slot = 0
        for i in range(gl.minimum(STAGES, issued)):
            bar_sync(12 + slot, 288)
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def query_head(
    args, ka, va, kt, dk, dv, n0, row, seqlen_q, slot, phase, b, b_phase,
    W: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr,
    DQ_L: gl.constexpr, DEFER: gl.constexpr, FOLD_LSE: gl.constexpr, FOLD_DELTA: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of one head that see the keys from n0 on; row: of its first query in dQ."""
    BLOCK_M: gl.constexpr = args[3].shape[1]
    BLOCK_N: gl.constexpr = args[1].shape[0]
    low = 0
    first = 0
    if CAUSAL:
        first = n0 + 0
        low = n0 + BLOCK_N
        for m in range(n0, n0 + BLOCK_N, BLOCK_M):
            dk, dv, slot, phase, b, b_phase = step(
                args, ka, va, kt, dk, dv, m, first, n0, row, slot, phase, b, b_phase,
                W, True, STAGES, S_L, KV_L, DQ_L, DEFER, FOLD_LSE, FOLD_DELTA, NAMED,
            )  # fmt: skip
    for m in range(low, seqlen_q, BLOCK_M):
        dk, dv, slot, phase, b, b_phase = step(
            args, ka, va, kt, dk, dv, m, first, n0, row, slot, phase, b, b_phase,
            W, False, STAGES, S_L, KV_L, DQ_L, DEFER, FOLD_LSE, FOLD_DELTA, NAMED,
        )  # fmt: skip
    if DEFER:
        wait_ds(args[12], 1 - b, b_phase ^ (1 - b), W, NAMED)
        dq_t = issue_dq(kt, args[1], args[7].index(1 - b), W, DEFER, DQ_L)
        dq = warpgroup_mma_wait(0, deps=(dq_t,))
        add_dq(dq, args[0], args[8].index(W), row + seqlen_q - BLOCK_M, W)
    return dk, dv, slot, phase, b, b_phase


@gluon.jit
def consumer(
    args, ends, W: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPED: gl.constexpr,
    DEFER: gl.constexpr, FOLD_LSE: gl.constexpr, FOLD_DELTA: gl.constexpr, NAMED: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """dK and dV of keys 64 W .. 64 W + 63 of every tile of this block, and a half of the tile's part of dQ.

    GROUPED: several query heads share the keys; their gradients are summed in registers.
    """
    (
        dk_desc, dv_desc, kv_full, kv_empty, tile_smem, tile_full, tile_empty, scale,
        seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group,
    ) = ends  # fmt: skip
    k_smem = args[1]
    dtype: gl.constexpr = k_smem.dtype
    D: gl.constexpr = k_smem.shape[1]
    BLOCK_M: gl.constexpr = args[3].shape[1]
    BLOCK_N: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = BLOCK_N // 2
    DQ_N: gl.constexpr = BLOCK_M // 2 if DEFER else D // 2
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DQ_N, 16])
    staging = reinterpret(args[8].index(W), dtype, [KEYS, D], GRADIENT_L)  # dV and dK leave where dQ does
    kw = k_smem.slice(W * KEYS, KEYS, dim=0)
    vw = args[2].slice(W * KEYS, KEYS, dim=0)
    key_tiles = seqlen_k // BLOCK_N
    slot = 0
    phase = 0
    b = 0
    b_phase = 0
    kv_phase = 0
    tile_slot = 0
    tile_phase = 0
    tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, head_group, batch_heads, CAUSAL)
        n0 = n * BLOCK_N
        dk = gl.zeros([KEYS, D], gl.float32, KV_L)
        dv = gl.zeros([KEYS, D], gl.float32, KV_L)
        mbarrier.wait(kv_full, kv_phase)
        kv_phase ^= 1
        if DEFER:
            ka = kw.load(gl.DotOperandLayout(0, S_L, 2))
            va = vw.load(gl.DotOperandLayout(0, S_L, 2))
            kt = k_smem.permute((1, 0)).load(gl.DotOperandLayout(0, DQ_L, 2))
            if PERSISTENT:
                mbarrier.arrive(kv_empty, count=1)  # K and V are in registers now
        else:
            ka = kw
            va = vw
            kt = k_smem
        if GROUPED:
            for member in range(group_size):
                dk, dv, slot, phase, b, b_phase = query_head(
                    args, ka, va, kt, dk, dv, n0, (batch_head * group_size + member) * seqlen_q, seqlen_q,
                    slot, phase, b, b_phase,
                    W, CAUSAL, STAGES, S_L, KV_L, DQ_L, DEFER, FOLD_LSE, FOLD_DELTA, NAMED,
                )  # fmt: skip
        else:
            dk, dv, slot, phase, b, b_phase = query_head(
                args, ka, va, kt, dk, dv, n0, batch_head * seqlen_q, seqlen_q, slot, phase, b, b_phase,
                W, CAUSAL, STAGES, S_L, KV_L, DQ_L, DEFER, FOLD_LSE, FOLD_DELTA, NAMED,
            )  # fmt: skip
        if PERSISTENT:
            if not DEFER:
                mbarrier.arrive(kv_empty, count=1)
            mbarrier.wait(tile_full.index(tile_slot), tile_phase)
            tile = tile_smem.index(tile_slot).load(gl.BlockedLayout([1], [32], [4], [0])).item()
            mbarrier.arrive(tile_empty.index(tile_slot), count=1)
            tile_slot, tile_phase = advance(tile_slot, tile_phase, 2)
        else:
            tile = key_tiles * batch_heads
        batch = batch_head // num_heads_kv
        head = batch_head % num_heads_kv
        key = n0 + W * KEYS
        tma.store_wait(0)
        staging.store(dv.to(dtype))
        fence_async_shared()
        copy_out(dv_desc, [batch, head, key, 0], as_block(dv_desc, staging))
        dk = dk * scale
        tma.store_wait(0)
        staging.store(dk.to(dtype))
        fence_async_shared()
        copy_out(dk_desc, [batch, head, key, 0], as_block(dk_desc, staging))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES])
def flash_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, scale, scale_log2,
    seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUPED: gl.constexpr, DEFER: gl.constexpr,
    FOLD_LSE: gl.constexpr, FOLD_DELTA: gl.constexpr, NAMED: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Descriptors of q, dout (blocks of 64 rows), k, v (128), dk and dv (64), of the float32 sums of dq in register
    order, and of lse (base 2) and delta [batch, num_heads, seqlen_q]; counter: an int32 zero. scale_log2: the softmax
    scale times log2(e). batch_heads: batch * num_heads_kv.
    """
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # a half of the queries of dS is a whole panel of the swizzle
    DS_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64 if DEFER else 128, element_bitwidth=16, rank=2)
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    ds_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], DS_L)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)  # noqa: RUF005
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    tile_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=2)
    fence_async_shared()
    # run-time values only: a constexpr put into a tuple becomes a tensor
    steps = (
        dq_desc, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, q_full, do_full, empty,
        ds_full, scale_log2,
    )  # fmt: skip
    ends = (
        dk_desc, dv_desc, kv_full, kv_empty, tile_smem, tile_full, tile_empty, scale,
        seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group,
    )  # fmt: skip
    copies = (
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
        kv_full, kv_empty, q_full, do_full, empty, tile_smem, tile_full, tile_empty, counter,
        seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group,
    )  # fmt: skip
    gl.warp_specialize([
        (consumer, (steps, ends, 0, STAGES, CAUSAL, GROUPED, DEFER, FOLD_LSE, FOLD_DELTA, NAMED, PERSISTENT)),
        (consumer, (steps, ends, 1, STAGES, CAUSAL, GROUPED, DEFER, FOLD_LSE, FOLD_DELTA, NAMED, PERSISTENT)),
        (producer, (copies, STAGES, CAUSAL, NAMED, PERSISTENT)),
    ], [4, 1], [240, 24])  # fmt: skip
