"""The 8-bit consumer that computes scores two blocks ahead: device functions of kernels/flash_fwd_fp8.py.

8-bit products take half as long as the softmax, so that a warpgroup that waits for its next scores is what costs. Here
the scores of block t+1 and the second product of block t-1 run beside the softmax of block t, and nothing is waited for
but them, at its end. It takes one more tile of float32 scores in registers.

Slot s holds K of block s and V of block s-2, behind one barrier: a tile of n blocks has n + 2 slots. The last scores
that are issued, of a block that there is not, are of what a slot happens to hold, and nobody reads them: no step is an
exception. A slot is released beside the next products. Where the softmax stands is delicate: LLVM and ptxas move it
behind the wait at the end of a step unless results are pinned ahead of the barrier and the step ends with the loop. So
there are no two steps in a round, which would spare the moves of the scores from where they are computed to where they
are read, 64 of 507 instructions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from blocktune.kernels.hopper_fp8_steps import (
    add_values,
    as_operand,
    exponentials,
    exponents_base,
    moved,
    next_stretch,
    packed,
    scale_of,
    stretch_of,
)
from blocktune.kernels.hopper_fwd_steps import (
    finished,
    hand_back,
    hide,
    key_range,
    no_sums,
    reference,
    release,
    row_bounds,
    scores,
    store_rows,
)
from blocktune.kernels.hopper_fwd_tiles import divided, receive
from blocktune.kernels.hopper_tiles import advance, locate, pin, row_max, thread_sum, times_rows

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators


@gluon.jit
def step_ahead(
    memory, q_place, state, slot, phase, previous, column, begins, mask, scale, no_acc,
    ALIGNED: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr, SPLIT_RELEASE: gl.constexpr,
    CONVERT: gl.constexpr, POLY: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr,
):  # fmt: skip
    """The softmax of one block beside the scores of the next and the second product of the one before.

    begins: whether a stretch of keys begins with the block before. state: as in `step`, and the scores of the block.
    """
    q_smem, k_smem, v_smem, full, k_empty, v_empty = memory
    whole, due, acc, p, factor, maximum, sums, qk = state
    TAU: gl.constexpr = 4.0
    BESIDE_PRODUCT: gl.constexpr = 2
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    next_t = scores(q_smem, q_place, k_smem, slot, no_acc, 1)
    whole, due, acc = next_stretch(whole, due, acc, pin(factor), begins, O_L)
    release(k_empty, v_empty, previous, SPLIT_RELEASE)
    acc_t = add_values(as_operand(p, q_smem[0].dtype, P_L), v_smem, slot, acc, begins)
    if RIGHT and not ALIGNED:
        last, first, highest = mask
        if column > highest:
            qk = hide(qk, last, first, column, True, False, S_L)
    new = gl.maximum(maximum, row_max(qk, ROW_S) * scale)
    new = gl.where(new - maximum > TAU, new, maximum)
    p = exponentials(qk, scale, exponents_base(new, ALIGNED), POLY)
    factor = gl.exp2(maximum - reference(new, ALIGNED))
    sums = times_rows(sums, factor) + thread_sum(p)
    # pinned: else LLVM moves the softmax behind the barrier, where it is beside nothing
    if CONVERT == BESIDE_PRODUCT:
        p = pin(packed(p))
    else:
        p = pin(p)
    sums = pin(sums)
    previous = slot + 0
    slot, phase = advance(slot, phase, STAGES)
    # what the next step reads; also the branch that keeps the wait for the products below the softmax
    mbarrier.wait(full.index(slot), phase)
    product, qk = warpgroup_mma_wait(0, deps=(acc_t[0], next_t))
    if CONVERT == BESIDE_PRODUCT:
        p = moved(p)
    else:
        p = packed(pin(p))
    return (whole, due, (product,), p, factor, new, sums, qk), slot, phase, previous


@gluon.jit
def consumer_ahead(
    args, C: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, RAGGED: gl.constexpr,
    RIGHT: gl.constexpr, ALIGNED: gl.constexpr, SPLIT_RELEASE: gl.constexpr, CONVERT: gl.constexpr,
    POLY: gl.constexpr,
):  # fmt: skip
    """Computes rows 64 C .. 64 C + 63 of every tile of this block, as `consumer` of hopper_fp8_tiles.py does."""
    (
        o_desc, lse, q_smem, k_smem, v_smem, o_smem, q_full, q_empty, full, k_empty, v_empty, _turns, tile_smem,
        tile_full, tile_empty, scale_log2, scale_q, scale_k, scale_v, scale_qb, scale_qh, scale_kb, scale_kh, scale_vb,
        scale_vh, seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right,
    ) = args  # fmt: skip
    ROWS: gl.constexpr = 64
    LN_2: gl.constexpr = 0.6931471805599453
    WIDTH: gl.constexpr = v_smem.shape[1]
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    SKIPS: gl.constexpr = RIGHT and not (ALIGNED and BLOCK_M == BLOCK_N)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    STRETCH: gl.constexpr = stretch_of(BLOCK_N)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    dtype: gl.constexpr = q_smem[0].dtype
    memory = q_smem, k_smem, v_smem, full, k_empty, v_empty
    q_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    no_acc = gl.zeros([ROWS, BLOCK_N], gl.float32, S_L)
    slot = 0
    phase = 0
    q_phase = 0
    tile_slot = 0
    tile_phase = 0
    tile = gl.program_id(0)
    while tile < q_tiles * batch_heads:
        m, batch_head = locate(tile, q_tiles, head_group, batch_heads, RIGHT)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        head_kv = head // group_size
        row_start = m * BLOCK_M + C * ROWS
        scale = scale_log2 * scale_of(scale_q, scale_qb, scale_qh, batch, head)
        scale *= scale_of(scale_k, scale_kb, scale_kh, batch, head_kv)
        out_scale = scale_of(scale_v, scale_vb, scale_vh, batch, head_kv)
        first, last = key_range(m * BLOCK_M, seqlen_q, seqlen_k, right, 0, BLOCK_M, BLOCK_N, RIGHT, False)
        _, own_last = key_range(row_start, seqlen_q, seqlen_k, right, 0, ROWS, BLOCK_N, RIGHT, False)
        if SKIPS:  # blocks wholly right of what these rows see
            slot, phase = hand_back(last - own_last, full, k_empty, v_empty, slot, phase, STAGES, SPLIT_RELEASE)

        # the scores of the first block alone, then its softmax beside those of the second
        mbarrier.wait(q_full.index(C), q_phase)
        mbarrier.wait(full.index(slot), phase)
        qk_t = scores(q_smem, C, k_smem, slot, no_acc, 1)
        qk = warpgroup_mma_wait(0, deps=(qk_t,))
        release(k_empty, v_empty, slot, SPLIT_RELEASE)
        slot, phase = advance(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        next_t = scores(q_smem, C, k_smem, slot, no_acc, 1)
        last_seen, first_seen = row_bounds(row_start, seqlen_k, right, 0, ROWS, RAGGED, RIGHT, False, ROW_S)
        qk = hide(qk, last_seen, first_seen, own_last * BLOCK_N, RAGGED or RIGHT, False, S_L)
        maximum = row_max(qk, ROW_S) * scale
        p = exponentials(qk, scale, exponents_base(maximum, ALIGNED), POLY)
        sums = thread_sum(p)
        acc = no_sums(ROWS, 1, WIDTH, O_L, O_L)
        whole = gl.zeros([ROWS, WIDTH], gl.float32, O_L)
        factor = gl.full([ROWS], 1.0, gl.float32, ROW_S)
        due = gl.full([ROWS], 1.0, gl.float32, ROW_S)
        previous = slot + 0
        slot, phase = advance(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        qk = warpgroup_mma_wait(0, deps=(next_t,))
        p = packed(pin(p))
        state = whole, due, acc, p, factor, maximum, sums, qk
        # blocks of keys up to the one from `highest` on are wholly visible
        highest = seqlen_k - BLOCK_N
        if RIGHT:
            highest = gl.minimum(seqlen_k, row_start + right + 1) - BLOCK_N
        mask = last_seen, first_seen, highest

        for i in range(own_last - first):
            state, slot, phase, previous = step_ahead(
                memory, C, state, slot, phase, previous, (own_last - 1 - i) * BLOCK_N, i % STRETCH == 0, mask, scale,
                no_acc, ALIGNED, STAGES, RIGHT, SPLIT_RELEASE, CONVERT, POLY, S_L, O_L,
            )  # fmt: skip
        whole, due, acc, p, factor, maximum, sums, qk = state

        # last step: the second product alone
        begins = (own_last - first) % STRETCH == 0
        whole, due, acc = next_stretch(whole, due, acc, factor, begins, O_L)
        acc_t = add_values(as_operand(p, dtype, P_L), v_smem, slot, acc, begins)
        release(k_empty, v_empty, previous, SPLIT_RELEASE)
        mbarrier.arrive(q_empty.index(C), count=1)
        q_phase ^= 1
        tile, tile_slot, tile_phase = receive(tile_smem, tile_full, tile_empty, tile_slot, tile_phase)
        total = gl.convert_layout(gl.sum(sums, 1), ROW_S)
        acc = finished(acc_t, 1)
        whole = whole * gl.convert_layout(due, gl.SliceLayout(1, O_L))[:, None] + acc[0]
        release(k_empty, v_empty, slot, SPLIT_RELEASE)
        slot, phase = advance(slot, phase, STAGES)
        if row_start < seqlen_q:
            tma.store_wait(0)
            o_smem[0].index(C).store(divided(whole * out_scale, total, ALIGNED, O_L).to(o_desc.dtype))
            fence_async_shared()
            store_rows(o_desc, batch, head, row_start, 0, seqlen_q, o_smem, C, 1, False)
            if lse is not None:
                rows = row_start + gl.arange(0, ROWS, ROW_S)
                start = batch_head.to(gl.int64) * seqlen_q
                shifted = exponents_base(maximum, True)
                gl.store(lse + start + rows, (shifted + gl.log2(total)) * LN_2, mask=rows < seqlen_q)
    tma.store_wait(0)
