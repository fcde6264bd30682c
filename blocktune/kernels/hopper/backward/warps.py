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
9. Hardware's named barriers may replace mbarriers between the warpgroups (NAMED, bit 0: exchange of dS, bit 1: release
   of a stage), because an mbarrier's arrival costs one more barrier of the warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper.backward.adders import await_last, give_dq, has_two_places
from blocktune.kernels.hopper.backward.ahead import await_values, walk_ahead
from blocktune.kernels.hopper.backward.arguments import Bounds, Steps
from blocktune.kernels.hopper.backward.bounds import (
    block_at,
    bounds_of,
    copy_rows,
    copy_rows_out,
    count_key_tiles,
    first_query,
    head_row,
    locate_keys,
    next_tile,
    places_of,
    query_range,
    rotated,
    sequence,
    walk_of,
    walks_back,
)
from blocktune.kernels.hopper.backward.form import (
    begins_with_masks,
    counts_all_tiles,
    ends_with_masks,
    is_diagonal,
    parts_of_walk,
)
from blocktune.kernels.hopper.backward.steps import (
    head_biases,
    issue_dq,
    no_products_yet,
    put_gradients,
    put_partial,
    step,
    wait_ds,
)
from blocktune.kernels.hopper.biases.of_keys import prefetch_mask
from blocktune.kernels.hopper.common.device_functions import advance, as_block, copy_in, reinterpret
from blocktune.kernels.hopper.common.named_barriers import bar_sync
from blocktune.kernels.hopper.common.slots import first_slot, publish, receive


@gluon.jit
def copy_keys(desc, memory, ends, batch, head, key, begin, length, OPTIONS: gl.constexpr):
    """K or V of a tile, which are awaited together."""
    copy_rows(desc, batch, head, key, 0, begin, length, ends.kv_full, as_block(desc, memory), OPTIONS)


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, ends, counter, sizes, biases, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Copies K and V of every tile of this block, Q, dO and their statistics of every step; fetches the next tiles.

    An additive mask is fetched into the L2 cache as far ahead as Q is copied.
    """
    STAGES: gl.constexpr = OPTIONS.STAGES
    PERSISTENT: gl.constexpr = OPTIONS.PERSISTENT
    PARTS: gl.constexpr = OPTIONS.PARTS
    EARLY: gl.constexpr = OPTIONS.AHEAD and OPTIONS.SHORT
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    ROW_BYTES: gl.constexpr = q_desc.block_type.nbytes + lse_desc.block_type.nbytes
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = count_key_tiles(seqlen_k, BLOCK_N, OPTIONS)
    slot = 0
    phase = 1
    kv_phase = 1
    tile_slot = first_slot(1)
    issued = 0
    if counts_all_tiles(OPTIONS):
        tile = next_tile(counter, key_tiles, sizes, BLOCK_N, OPTIONS)
        tile_slot = publish(tile, ends.ring, tile_slot)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS)
        back = walks_back(batch_head, sizes.head_group, batch_heads, OPTIONS)
        batch = batch_head // num_heads_kv
        head_kv = batch_head % num_heads_kv
        first = 0
        low = 0
        high = seqlen_q
        end = seqlen_q
        begin_q = 0
        begin_k = 0
        len_q = seqlen_q
        len_k = seqlen_k
        if OPTIONS.GENERAL:
            begin_q, len_q = sequence(sizes.cu_q, batch, seqlen_q, OPTIONS)
            begin_k, len_k = sequence(sizes.cu_k, batch, seqlen_k, OPTIONS)
            above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, OPTIONS)
            first, low, high, end, _seen = query_range(
                n * BLOCK_N, len_q, len_k, above, below, BLOCK_M, BLOCK_N, OPTIONS
            )  # fmt: skip
        elif OPTIONS.CAUSAL:
            first = n * BLOCK_N
        for member in range(group_size):
            head = head_kv * group_size + member
            stat_row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, OPTIONS
            )  # fmt: skip
            entries, low, high, end = walk_of(n, batch_head, member, low, high, end, sizes, BLOCK_M, OPTIONS)
            for place in range(first, end, BLOCK_M):
                at = rotated(place, n * BLOCK_N, low, high, OPTIONS)
                m = first_query(block_at(at, first, end, back, BLOCK_M, OPTIONS, entries), OPTIONS)
                if OPTIONS.NAMED_RELEASE:
                    if issued >= STAGES:
                        bar_sync(12 + slot, 288)
                else:
                    mbarrier.wait(memory.empty.index(slot), phase)
                mbarrier.expect(memory.q_full.index(slot), ROW_BYTES)
                q_tile = as_block(q_desc, memory.q.index(slot))
                copy_rows(q_desc, batch, head, m, 0, begin_q, len_q, memory.q_full.index(slot), q_tile, OPTIONS)
                if OPTIONS.MASK == 2:
                    prefetch_mask(biases, batch, head, n * BLOCK_N, len_k, m, BLOCK_M, BLOCK_N)
                copy_in(lse_desc, [stat_row + m], memory.q_full.index(slot), memory.lse.index(slot))
                if not EARLY:
                    if (place == first) & (member == 0):  # right behind the first Q
                        mbarrier.wait(ends.kv_empty, kv_phase)
                        mbarrier.expect(ends.kv_full, 2 * k_desc.block_type.nbytes)
                        copy_keys(k_desc, memory.k, ends, batch, head_kv // PARTS, n * BLOCK_N, begin_k, len_k, OPTIONS)
                        copy_keys(v_desc, memory.v, ends, batch, head_kv // PARTS, n * BLOCK_N, begin_k, len_k, OPTIONS)
                        kv_phase ^= 1
                mbarrier.expect(memory.do_full.index(slot), ROW_BYTES)
                do_tile = as_block(do_desc, memory.do.index(slot))
                copy_rows(do_desc, batch, head, m, 0, begin_q, len_q, memory.do_full.index(slot), do_tile, OPTIONS)
                copy_in(delta_desc, [stat_row + m], memory.do_full.index(slot), memory.delta.index(slot))
                if EARLY:
                    if (place == first) & (member == 0):  # V, then K, each as soon as it has been read
                        if issued > 0:
                            await_values()
                        mbarrier.expect(ends.kv_full, 2 * k_desc.block_type.nbytes)
                        copy_keys(v_desc, memory.v, ends, batch, head_kv // PARTS, n * BLOCK_N, begin_k, len_k, OPTIONS)
                        mbarrier.wait(ends.kv_empty, kv_phase)
                        copy_keys(k_desc, memory.k, ends, batch, head_kv // PARTS, n * BLOCK_N, begin_k, len_k, OPTIONS)
                        kv_phase ^= 1
                slot, phase = advance(slot, phase, STAGES)
                issued += 1
        if PERSISTENT:
            tile = next_tile(counter, key_tiles, sizes, BLOCK_N, OPTIONS)
            tile_slot = publish(tile, ends.ring, tile_slot)
        else:
            tile = key_tiles * batch_heads
    if EARLY:
        if issued > 0:
            await_values()
    if OPTIONS.NAMED_RELEASE:  # take the last releases, so that no named barrier is left half full
        if issued < STAGES:
            slot = 0
        for i in range(gl.minimum(STAGES, issued)):
            bar_sync(12 + slot, 288)
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def query_head(
    steps, ka, va, kt, dk, dv, n0, row, first, low, high, end, back, entries, bounds, slot, phase, b, b_phase,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of one head that see the keys from n0 on; row: of its first query in dQ.

    From `low` to `high` every query sees every key. In a fixed order of additions the walk may go
    back (`block_at`), and where nothing is masked it begins elsewhere (`rotated`). entries: see `walk_of`.
    """
    memory = steps.memory
    DEFER: gl.constexpr = OPTIONS.DEFER
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    if is_diagonal(OPTIONS):
        first = n0 + 0
        low = n0 + BLOCK_N
    low, high = places_of(first, low, high, end, back, OPTIONS)
    masked, whole, stop = first, low, high
    for _ in range(parts_of_walk(OPTIONS)):
        if begins_with_masks(OPTIONS):
            for place in range(masked, whole, BLOCK_M):
                m = block_at(place, first, end, back, BLOCK_M, OPTIONS, entries)
                before = rotated(place - BLOCK_M, n0, low, high, OPTIONS)
                dk, dv, slot, phase, b, b_phase = step(
                    steps, ka, va, kt, dk, dv, m, before, place > first, n0, row, bounds, slot, phase, b, b_phase,
                    W, True, OPTIONS, S_L, KV_L, DQ_L,
                )  # fmt: skip
        for place in range(whole, stop, BLOCK_M):
            m = block_at(rotated(place, n0, low, high, OPTIONS), first, end, back, BLOCK_M, OPTIONS, entries)
            before = rotated(place - BLOCK_M, n0, low, high, OPTIONS)
            dk, dv, slot, phase, b, b_phase = step(
                steps, ka, va, kt, dk, dv, m, before, place > first, n0, row, bounds, slot, phase, b, b_phase,
                W, False, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
        masked, whole, stop = high, end, end
    if ends_with_masks(OPTIONS):
        for place in range(high, end, BLOCK_M):
            m = block_at(place, first, end, back, BLOCK_M, OPTIONS, entries)
            before = rotated(place - BLOCK_M, n0, low, high, OPTIONS)
            dk, dv, slot, phase, b, b_phase = step(
                steps, ka, va, kt, dk, dv, m, before, place > first, n0, row, bounds, slot, phase, b, b_phase,
                W, True, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
    if DEFER:
        wait_ds(memory.ds_full, 1 - b, b_phase ^ (1 - b), W, OPTIONS)
        dq_t = issue_dq(kt, memory.k, memory.ds.index(1 - b), W, DEFER, DQ_L)
        dq = warpgroup_mma_wait(0, deps=(dq_t,))
        last = rotated(end - BLOCK_M, n0, low, high, OPTIONS)
        give_dq(dq, steps, row + last, 1 - b, b_phase ^ (1 - b), W, OPTIONS)
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
    dtype: gl.constexpr = memory.k.dtype
    D: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    KEYS: gl.constexpr = BLOCK_N // 2
    DQ_N: gl.constexpr = BLOCK_M // 2 if DEFER else D // 2
    SPREAD: gl.constexpr = OPTIONS.SHORT and has_two_places(memory.dq) and OPTIONS.PARTS == 1
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
    key_tiles = count_key_tiles(seqlen_k, BLOCK_N, OPTIONS)
    slot = 0
    phase = 0
    b = 0
    b_phase = 0
    kv_phase = 0
    tile_slot = first_slot(0)
    if not OPTIONS.AHEAD:
        no_products_yet()
    if counts_all_tiles(OPTIONS):
        tile, tile_slot = receive(ends.ring, tile_slot)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS)
        back = walks_back(batch_head, sizes.head_group, batch_heads, OPTIONS)
        n0 = n * BLOCK_N
        first = 0
        low = 0
        high = seqlen_q
        end = seqlen_q
        begin_q = 0
        begin_k = 0
        len_k = seqlen_k
        bounds = None
        if OPTIONS.GENERAL:
            begin_q, len_q = sequence(sizes.cu_q, batch_head // num_heads_kv, seqlen_q, OPTIONS)
            begin_k, len_k = sequence(sizes.cu_k, batch_head // num_heads_kv, seqlen_k, OPTIONS)
            above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, OPTIONS)
            first, low, high, end, _seen = query_range(n0, len_q, len_k, above, below, BLOCK_M, BLOCK_N, OPTIONS)
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
        if OPTIONS.AHEAD:
            dk, dv, slot, phase, b, b_phase = walk_ahead(
                steps, dk, dv, n, batch_head, sizes, first, low, high, end, back, bounds, slot, phase, b, b_phase,
                W, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
        elif OPTIONS.GROUPED:
            for member in range(group_size):
                row = head_row(
                    batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, OPTIONS
                )  # fmt: skip
                entries, low, high, end = walk_of(n, batch_head, member, low, high, end, sizes, BLOCK_M, OPTIONS)
                own = Steps(
                    dq_desc=steps.dq_desc,
                    dq_sums=steps.dq_sums,
                    memory=memory,
                    scale_log2=steps.scale_log2,
                    cap_in=steps.cap_in,
                    biases=steps.biases,
                    head=head_biases(steps, batch_head, member, n0 + W * KEYS, bounds, sizes, OPTIONS, S_L),
                )
                dk, dv, slot, phase, b, b_phase = query_head(
                    own, ka, va, kt, dk, dv, n0, row, first, low, high, end, back, entries, bounds,
                    slot, phase, b, b_phase, W, OPTIONS, S_L, KV_L, DQ_L,
                )  # fmt: skip
        else:
            row = head_row(batch_head, 0, num_heads_kv, 1, begin_q, seqlen_q, sizes.rows, BLOCK_M, False, OPTIONS)
            entries, low, high, end = walk_of(n, batch_head, 0, low, high, end, sizes, BLOCK_M, OPTIONS)
            own = Steps(
                dq_desc=steps.dq_desc,
                dq_sums=steps.dq_sums,
                memory=memory,
                scale_log2=steps.scale_log2,
                cap_in=steps.cap_in,
                biases=steps.biases,
                head=head_biases(steps, batch_head, 0, n0 + W * KEYS, bounds, sizes, OPTIONS, S_L),
            )
            dk, dv, slot, phase, b, b_phase = query_head(
                own, ka, va, kt, dk, dv, n0, row, first, low, high, end, back, entries, bounds, slot, phase, b, b_phase,
                W, OPTIONS, S_L, KV_L, DQ_L,
            )  # fmt: skip
        if PERSISTENT:
            if not DEFER:
                mbarrier.arrive(ends.kv_empty, count=1)
            tile, tile_slot = receive(ends.ring, tile_slot)
        else:
            tile = key_tiles * batch_heads
        batch = batch_head // num_heads_kv
        head = batch_head % num_heads_kv
        key = n0 + W * KEYS
        if OPTIONS.ADDERS and not SPREAD:
            await_last(memory, b, b_phase, W)
        # [KEYS, head_dim]
        if SPREAD:
            put_gradients(
                dk * scale, dv, dk_desc, dv_desc, batch, head, key, begin_k, len_k, memory, b, b_phase, W, OPTIONS
            )
        elif OPTIONS.PARTS > 1:
            block = (batch_head * key_tiles + n) * 2 + W
            put_partial(dv, dv_desc, memory.dq.index(W), block)
            put_partial(dk, dk_desc, memory.dq.index(W), block)
        else:
            tma.store_wait(0)
            staging.store(dv.to(dtype))
            fence_async_shared()
            copy_rows_out(dv_desc, batch, head, key, 0, begin_k, len_k, as_block(dv_desc, staging), OPTIONS)
            dk = dk * scale
            tma.store_wait(0)
            staging.store(dk.to(dtype))
            fence_async_shared()
            copy_rows_out(dk_desc, batch, head, key, 0, begin_k, len_k, as_block(dk_desc, staging), OPTIONS)
    tma.store_wait(0)
