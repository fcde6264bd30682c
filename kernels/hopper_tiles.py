"""Attention forward on Hopper's own instructions, in Gluon: the device functions of kernels/flash_fwd_hopper.py.

A block has one producer warp, which copies tiles by TMA, and CONSUMERS warpgroups of 64 query rows each, which compute.
What makes it fast, each measured alone (FlashAttention-3, arXiv 2407.08608, section 3, except 1, which is
FlashAttention-4's):

1. Lazy rescale: the running maximum is raised only when it is 2^TAU too small. Otherwise the factor is exactly 1, and
   the warp branches around the multiplications of the accumulator.
2. The scores of block j+1 and the second product of block j are issued together, and the softmax of j+1 runs beside the
   second product. ptxas likes to move the wait for that product above the softmax; a barrier wait between the two is a
   branch that stops it.
3. One barrier wait a step: slot g holds K of block i and V of block i-1 behind one `full` barrier.
4. Blocks are persistent and fetch tiles from a counter, longest first if causal.
5. Only the diagonal block is masked. It is the first one; the loop walks towards key 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 renamed the copies.
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def pin(x):
    """float32 x, used by no instruction: nothing that depends on the result is moved above this point."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.constexpr_function
def rescale_asm(count):
    """Assembly for `count` accumulator registers times their row's factor, skipped by a warp whose factors are all 1.

    Registers alternate two of row r and two of row r + 8, so operands 2 count and 2 count + 2 are a thread's factors.
    """
    head = ["{", ".reg .pred p, q;"]
    head += [f"setp.neu.f32 p, ${2 * count}, 0f3F800000;", f"setp.neu.f32 q, ${2 * count + 2}, 0f3F800000;"]
    head += ["or.pred p, p, q;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra SKIP;"]
    return "\n".join([*head, *(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)), "SKIP:", "}"])


@gluon.constexpr_function
def rescale_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale(acc, factor, ROW_O: gl.constexpr):
    """acc [64, HEAD_DIM] times factor [64]."""
    PER_THREAD: gl.constexpr = acc.shape[1] // 2
    ASM: gl.constexpr = rescale_asm(PER_THREAD)
    CONSTRAINTS: gl.constexpr = rescale_constraints(PER_THREAD)
    factors = gl.convert_layout(factor, ROW_O)[:, None]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, factors], dtype=gl.float32, is_pure=False, pack=PER_THREAD)


@gluon.jit
def row_max(x, ROW_S: gl.constexpr):
    """The row maximum; the reshape makes four independent chains of a thread's registers instead of two."""
    y = gl.max(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 1)
    return gl.convert_layout(gl.max(gl.max(y, 2), 1), ROW_S)


@gluon.jit
def thread_sum(p):
    """[M, N] to [M, 4]: sums inside each thread; the four threads of a row are added once a tile, not once a block."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def times_rows(sums, factor):
    LAYOUT: gl.constexpr = sums.type.layout
    return sums * gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def locate(tile, q_tiles, head_group, batch_heads, CAUSAL: gl.constexpr):
    """(query tile, batch * num_heads + head). Causal: the longest first, inside a group of heads."""
    if CAUSAL:
        per_group = q_tiles * head_group
        first_head = tile // per_group * head_group
        heads_here = gl.minimum(batch_heads - first_head, head_group)
        rest = tile % per_group
        return q_tiles - 1 - rest // heads_here, first_head + rest % heads_here
    else:
        return tile % q_tiles, tile // q_tiles


@gluon.jit
def key_blocks(m, seqlen_k, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    if CAUSAL:
        return gl.minimum(((m + 1) * BLOCK_M - 1) // BLOCK_N + 1, seqlen_k // BLOCK_N)
    else:
        return seqlen_k // BLOCK_N


@gluon.jit
def producer(
    args, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr,
    SPLIT_RELEASE: gl.constexpr,
):  # fmt: skip
    """Copies Q, K and V of every tile of this block, and fetches its next tiles from the counter."""
    (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, full, k_empty, v_empty, tile_smem, tile_full,
        tile_empty, counter, seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group,
        q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, v_row_b, v_row_h, v_col_h,
    ) = args  # fmt: skip
    ROWS: gl.constexpr = 64
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    Q_BYTES: gl.constexpr = q_desc.block_type.nbytes
    KV_BYTES: gl.constexpr = k_desc.block_type.nbytes
    q_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    slot = 0
    phase = 1
    q_phase = 1
    tile_slot = 0
    tile_phase = 1
    tile = gl.program_id(0)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, head_group, batch_heads, CAUSAL)
        n = key_blocks(m, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // group_size
        q_row = batch * q_row_b + head * q_row_h + m * BLOCK_M
        k_row = batch * k_row_b + head_kv * k_row_h
        v_row = batch * v_row_b + head_kv * v_row_h
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), q_phase)
            mbarrier.expect(q_full.index(c), Q_BYTES)
            copy_in(q_desc, [q_row + c * ROWS, head * q_col_h], q_full.index(c), q_smem.index(c))
            if c == 0:  # step 0: the first K block, right behind the first Q
                mbarrier.wait(k_empty.index(slot), phase)
                if SPLIT_RELEASE:
                    mbarrier.wait(v_empty.index(slot), phase)
                mbarrier.expect(full.index(slot), KV_BYTES)
                copy_in(k_desc, [k_row + (n - 1) * BLOCK_N, head_kv * k_col_h], full.index(slot), k_smem.index(slot))
        q_phase ^= 1
        slot, phase = advance(slot, phase, STAGES)
        tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        mbarrier.wait(tile_empty.index(tile_slot), tile_phase)
        tile_smem.index(tile_slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(tile_full.index(tile_slot), count=1)
        tile_slot, tile_phase = advance(tile_slot, tile_phase, 2)
        for i in range(n - 1):  # steps 1 .. n-1: K of block i+1 and V of block i
            first = (n - 2 - i) * BLOCK_N
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(full.index(slot), 2 * KV_BYTES)
            copy_in(k_desc, [k_row + first, head_kv * k_col_h], full.index(slot), k_smem.index(slot))
            if SPLIT_RELEASE:
                mbarrier.wait(v_empty.index(slot), phase)
            copy_in(v_desc, [v_row + first + BLOCK_N, head_kv * v_col_h], full.index(slot), v_smem.index(slot))
            slot, phase = advance(slot, phase, STAGES)
        mbarrier.wait(k_empty.index(slot), phase)  # step n: the last V block
        if SPLIT_RELEASE:
            mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(full.index(slot), KV_BYTES)
        copy_in(v_desc, [v_row, head_kv * v_col_h], full.index(slot), v_smem.index(slot))
        slot, phase = advance(slot, phase, STAGES)
    # the last block to finish leaves the counters at zero for the next launch
    done = gl.atomic_add(counter + 1, 1)
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter, 0)
        gl.atomic_xchg(counter + 1, 0)


@gluon.jit
def consumer(
    args, C: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr, SPLIT_RELEASE: gl.constexpr, EARLY_P: gl.constexpr, KEEP_P: gl.constexpr,
):  # fmt: skip
    """Computes rows 64 C .. 64 C + 63 of every tile of this block.

    EARLY_P converts the probabilities before the next scores are issued, otherwise beside them; KEEP_P names them in
    the wait for their product, which changes nothing but ptxas' schedule.
    """
    (
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, full, k_empty, v_empty, tile_smem, tile_full,
        tile_empty, scale, seqlen_q, seqlen_k, num_heads, batch_heads, head_group, o_row_b, o_row_h, o_col_h,
    ) = args  # fmt: skip
    ROWS: gl.constexpr = 64
    TAU: gl.constexpr = 8.0
    MASKED: gl.constexpr = -1.0e30
    LN_2: gl.constexpr = 0.6931471805599453
    dtype: gl.constexpr = q_smem.dtype
    D: gl.constexpr = q_smem.shape[2]
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_L)
    q_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    no_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, S_L)
    q = q_smem.index(C)
    slot = 0
    phase = 0
    q_phase = 0
    tile_slot = 0
    tile_phase = 0
    tile = gl.program_id(0)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, head_group, batch_heads, CAUSAL)
        row_start = m * BLOCK_M + C * ROWS
        n = key_blocks(m, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
        steps = n - 1
        if CAUSAL:
            steps = gl.minimum(row_start, seqlen_q - ROWS) // BLOCK_N  # this warpgroup's diagonal block
            if CONSUMERS * ROWS != BLOCK_N:
                for i in range(n - 1 - steps):  # blocks wholly right of the diagonal: hand back unused
                    mbarrier.wait(full.index(slot), phase)
                    mbarrier.arrive(k_empty.index(slot), count=1)
                    if SPLIT_RELEASE:
                        mbarrier.arrive(v_empty.index(slot), count=1)
                    slot, phase = advance(slot, phase, STAGES)

        # step 0: the scores of the first (diagonal) block
        mbarrier.wait(q_full.index(C), q_phase)
        mbarrier.wait(full.index(slot), phase)
        qk = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), no_acc, use_acc=False, is_async=True)
        qk = warpgroup_mma_wait(0, deps=(qk,))
        # not `previous = slot`: Triton 3.6 does not carry a name through a loop that starts as an alias of another one
        previous = slot + 0
        slot, phase = advance(slot, phase, STAGES)
        if SPLIT_RELEASE:
            mbarrier.arrive(k_empty.index(previous), count=1)
        if CAUSAL:
            rows = row_start + gl.arange(0, ROWS, ROW_S)
            columns = steps * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_L))
            qk = gl.where(rows[:, None] >= columns[None, :], qk, MASKED)
        maximum = row_max(qk, ROW_S) * scale
        p = gl.exp2(qk * scale - maximum[:, None])
        sums = thread_sum(p)
        if EARLY_P:
            p_low = gl.convert_layout(p.to(dtype), P_L)
        acc = gl.zeros([ROWS, D], gl.float32, O_L)
        factor = gl.full([ROWS], 1.0, gl.float32, ROW_S)
        mbarrier.wait(full.index(slot), phase)

        # steps 1 ..: the scores of this block beside the second product of the one before
        for i in range(steps):
            qk_t = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), no_acc, use_acc=False, is_async=True)
            # beside the scores: rescale the accumulator, convert P, give the previous slot back
            acc = rescale(acc, pin(factor), ROW_O)
            if not EARLY_P:
                p_low = gl.convert_layout(pin(p).to(dtype), P_L)
            if SPLIT_RELEASE:
                mbarrier.arrive(v_empty.index(previous), count=1)
            else:
                mbarrier.arrive(k_empty.index(previous), count=1)
            acc_t = warpgroup_mma(p_low, v_smem.index(slot), acc, is_async=True)
            qk = warpgroup_mma_wait(1, deps=(qk_t,))
            if SPLIT_RELEASE:
                mbarrier.arrive(k_empty.index(slot), count=1)
            # softmax, while the second product runs
            new = gl.maximum(maximum, row_max(qk, ROW_S) * scale)
            new = gl.where(new - maximum > TAU, new, maximum)
            p = gl.exp2(qk * scale - new[:, None])
            factor = gl.exp2(maximum - new)
            sums = times_rows(sums, factor) + thread_sum(p)
            maximum = new
            previous = slot + 0
            slot, phase = advance(slot, phase, STAGES)
            # operands of the next step; also the branch that keeps the wait for the product below the softmax
            mbarrier.wait(full.index(slot), phase)
            if KEEP_P:
                acc, p_low = warpgroup_mma_wait(0, deps=(acc_t, p_low))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc_t,))
            if EARLY_P:
                p_low = gl.convert_layout(pin(p).to(dtype), P_L)

        # last step: the second product alone
        acc = rescale(acc, factor, ROW_O)
        if not EARLY_P:
            p_low = gl.convert_layout(p.to(dtype), P_L)
        acc_t = warpgroup_mma(p_low, v_smem.index(slot), acc, is_async=True)
        if SPLIT_RELEASE:
            mbarrier.arrive(v_empty.index(previous), count=1)
        else:
            mbarrier.arrive(k_empty.index(previous), count=1)
        mbarrier.arrive(q_empty.index(C), count=1)
        q_phase ^= 1
        mbarrier.wait(tile_full.index(tile_slot), tile_phase)
        tile = tile_smem.index(tile_slot).load(gl.BlockedLayout([1], [32], [4], [0])).item()
        mbarrier.arrive(tile_empty.index(tile_slot), count=1)
        tile_slot, tile_phase = advance(tile_slot, tile_phase, 2)
        total = gl.convert_layout(gl.sum(sums, 1), ROW_S)
        inverse = 1.0 / gl.convert_layout(total, ROW_O)
        acc = warpgroup_mma_wait(0, deps=(acc_t,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if SPLIT_RELEASE:
            mbarrier.arrive(v_empty.index(slot), count=1)
        slot, phase = advance(slot, phase, STAGES)
        acc = acc * inverse[:, None]
        if row_start < seqlen_q:
            batch = batch_head // num_heads
            head = batch_head % num_heads
            tma.store_wait(0)
            o_smem.index(C).store(acc.to(dtype))
            fence_async_shared()
            copy_out(o_desc, [batch * o_row_b + head * o_row_h + row_start, head * o_col_h], o_smem.index(C))
            if lse is not None:
                place = lse + batch_head.to(gl.int64) * seqlen_q + row_start + gl.arange(0, ROWS, ROW_S)
                gl.store(place, (maximum + gl.log2(total)) * LN_2)
    tma.store_wait(0)
