"""The Hopper attention backward for heads wider than 128, in Gluon: two warpgroups that compute, one warp that copies.

dK and dV of 64 keys and 256 columns fill two warpgroups' registers, so the warpgroups share the products instead of the
keys, all five once:

    warpgroup 0:  S^T = K Q^T,  P,   dV += P^T dO,   its part of dQ = dS K
    warpgroup 1:  dP^T = V dO^T, dS,  dK += dS^T Q,   its part of dQ

P goes from 0 to 1 in float32 and in the order of the registers, which are the same in both: 16-byte accesses, no
layout to be changed. dS comes back as the operand of dQ. Heads are panels of 64 columns, three or four, those of values
and outputs two to four: operands, accumulators, copies and parts of dQ alike; a last panel that is not full ends with
zeros.

What makes it fast, and is easily lost when the code changes:

1. No step loads a spilled register. Addresses of operands are computed in every step (`hidden_zero`).
2. A warpgroup has memory for one panel of dQ on its way to the sums, and two panels in a step, or 1 of three panels
   one. With three panels (`LATE`) the second one of 0 stays in registers until the copy engine has read the first, and
   is added during the next dV; with four every panel is added at once, and dK's products hide the wait of 1. On an H200
   with 8192 keys, late against at once, in TFLOP/s: three panels 514 against 392 full, 501 against 394 causal; four
   panels 474 against 507 and 462 against 494: there it takes 32 registers of a step that has none left. (What was
   late had the two buffers of 3 as well.)
3. K and V are given back ahead of a late panel of dQ, and dV and dK leave through two buffers in turns.

Barriers. A step has one exchange in each direction, P then dS, so that neither buffer needs a second one: warpgroup 0
writes P of step j + 1 after its wait for dS of step j, which 1 sent after its reading of P; 1 writes dS of step j + 1
after its wait for P of step j + 1, which 0 sent after its products with dS of step j were complete. Both wait in every
step for what the other sends in that step, and a tile has at least one (`query_range`), so that phases agree for one
step as for many. Q, and dO apart from it, are released by both warpgroups in every step (count 2), and the producer
waits for a slot from its second filling on: the parity it starts with lets the first ones pass.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blocktune.kernels.hopper.backward.arguments import Bounds, Ends, Order, Sizes, Steps, WideMemory, WideOptions
from blocktune.kernels.hopper.backward.bounds import (
    bounds_of,
    copy_rows,
    copy_rows_out,
    locate_keys,
    next_tile,
    pass_turn,
    query_range,
    sequence,
    turn_of,
)
from blocktune.kernels.hopper.backward.form import counts_all_tiles, has_last_masks, has_masks, is_ordered
from blocktune.kernels.hopper.backward.warps import BOUNDS, SIZES, head_row
from blocktune.kernels.hopper.backward.wide_steps import LATE, give_panel, step_of_gradients, step_of_scores
from blocktune.kernels.hopper.common.device_functions import advance, as_block, copy_in, reinterpret
from blocktune.kernels.hopper.common.slots import (
    new_barriers,
    new_tile_numbers,
    new_tile_ring,
    open_slot,
    publish,
    receive,
)

# mypy: disable-error-code="assignment,var-annotated"


@gluon.jit
def wide_step(
    steps, gradients, m, first, n0, row, bounds, order, slot, phase, do_slot, do_phase, parity,
    W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """One block of queries from m on, for either warpgroup."""
    if W == 0:
        return step_of_scores(
            steps, gradients, m, first, n0, row, bounds, order, slot, phase, do_slot, do_phase, parity,
            MASK, OPTIONS, S_L,
        )  # fmt: skip
    else:
        return step_of_gradients(
            steps, gradients, m, first, row, bounds, order, slot, phase, do_slot, do_phase, parity, OPTIONS, S_L,
        )  # fmt: skip


@gluon.jit
def wide_head(
    steps, gradients, kv_empty, last, n0, row, first, low, high, end, bounds, order,
    slot, phase, do_slot, do_phase, parity,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of one head that see the keys from n0 on; only P is masked, and only in warpgroup 0."""
    memory = steps.memory
    FORM: gl.constexpr = OPTIONS.FORM
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    PANELS: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    if W == 1:
        low = first + 0
        high = end + 0
    if W == 0 and has_masks(FORM):
        for m in range(first, low, BLOCK_M):
            gradients, slot, phase, do_slot, do_phase, parity = wide_step(
                steps, gradients, m, first, n0, row, bounds, order, slot, phase, do_slot, do_phase, parity,
                W, True, OPTIONS, S_L,
            )  # fmt: skip
    for m in range(low, high, BLOCK_M):
        gradients, slot, phase, do_slot, do_phase, parity = wide_step(
            steps, gradients, m, first, n0, row, bounds, order, slot, phase, do_slot, do_phase, parity,
            W, False, OPTIONS, S_L,
        )  # fmt: skip
    if W == 0 and has_last_masks(FORM):
        for m in range(high, end, BLOCK_M):
            gradients, slot, phase, do_slot, do_phase, parity = wide_step(
                steps, gradients, m, first, n0, row, bounds, order, slot, phase, do_slot, do_phase, parity,
                W, True, OPTIONS, S_L,
            )  # fmt: skip
    if OPTIONS.PERSISTENT:
        mbarrier.arrive(kv_empty, count=1, pred=last)
    if W == 0 and PANELS == LATE:
        give_panel(gradients[memory.v.shape[0]], steps.dq_desc, memory.dq.index(0), row + end - BLOCK_M, 1, PANELS)
    if is_ordered(FORM):
        m = end - BLOCK_M
        turn = order.turns + (row + m) // BLOCK_M * 2 + W
        pass_turn(turn, turn_of(order.tile, m, bounds, order.seen, BLOCK_M, BLOCK_N, 4, FORM))
    return gradients, slot, phase, do_slot, do_phase, parity


@gluon.jit
def wide_consumer(
    steps, ends, sizes, gradient_desc, scale, turns, W: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dV (W 0) or dK (W 1) of every tile of this block, and a part of the tile's dQ."""
    memory = steps.memory
    FORM: gl.constexpr = OPTIONS.FORM
    dtype: gl.constexpr = memory.k.dtype
    PANELS: gl.constexpr = memory.k.shape[0]
    OWN_PANELS: gl.constexpr = memory.v.shape[0] if W == 0 else PANELS
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    # [2, BLOCK_N, 64]
    staging = reinterpret(memory.dq.index(W), dtype, [2, BLOCK_N, 64], GRADIENT_L)  # they leave where dQ does
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    slot = 0
    phase = 0
    do_slot = 0
    do_phase = 0
    parity = 0
    kv_phase = 0
    tile_slot = 0
    tile_phase = 0
    if counts_all_tiles(FORM):
        tile, tile_slot, tile_phase = receive(ends.ring, tile_slot, tile_phase)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS.CAUSAL, FORM)
        n0 = n * BLOCK_N
        entry = batch_head // num_heads_kv
        begin_q, len_q = sequence(sizes.cu_q, entry, seqlen_q, FORM)
        begin_k, len_k = sequence(sizes.cu_k, entry, seqlen_k, FORM)
        above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, FORM)
        first, low, high, end, seen = query_range(n0, len_q, len_k, above, below, BLOCK_M, BLOCK_N, FORM)
        bounds = Bounds(upper=above, lower=below, queries=len_q, keys=len_k)
        order = Order(tile=n, seen=seen, turns=turns)
        # panels [BLOCK_N, 64]
        gradients = ()
        for _ in gl.static_range(OWN_PANELS + 1 if W == 0 and PANELS == LATE else OWN_PANELS):
            gradients = gradients + (gl.zeros([BLOCK_N, 64], gl.float32, S_L),)  # noqa: RUF005
        mbarrier.wait(ends.kv_full, kv_phase)
        kv_phase ^= 1
        for member in range(group_size):
            row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, FORM
            )
            gradients, slot, phase, do_slot, do_phase, parity = wide_head(
                steps, gradients, ends.kv_empty, member == group_size - 1, n0, row, first, low, high, end, bounds,
                order, slot, phase, do_slot, do_phase, parity,
                W, OPTIONS, S_L,
            )  # fmt: skip
        if OPTIONS.PERSISTENT:
            tile, tile_slot, tile_phase = receive(ends.ring, tile_slot, tile_phase)
        else:
            tile = key_tiles * batch_heads
        head = batch_head % num_heads_kv
        for panel in gl.static_range(OWN_PANELS):
            gradient = gradients[panel]
            if W == 1:
                gradient = gradient * scale
            if panel != 1:
                tma.store_wait(panel // 2)
            half = staging.index(panel % 2)
            half.store(gradient.to(dtype))
            fence_async_shared()
            copy_rows_out(
                gradient_desc, entry, head, n0, panel * 64, begin_k, len_k, as_block(gradient_desc, half), FORM
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def copy_panels(
    desc, entry, head, row, begin, length, barrier, memory, slot, PANELS: gl.constexpr, FORM: gl.constexpr
):  # fmt: skip
    """All panels of 64 rows, into a slot."""
    for panel in gl.static_range(PANELS):
        tile = as_block(desc, memory.index(slot * PANELS + panel))
        copy_rows(desc, entry, head, row, panel * 64, begin, length, barrier, tile, FORM)


@gluon.jit
def wide_producer(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, counter, ends, sizes, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Copies K and V of every tile of this block, Q, dO and their statistics of every step; fetches the next tiles."""
    CAUSAL: gl.constexpr = OPTIONS.CAUSAL
    FORM: gl.constexpr = OPTIONS.FORM
    PANELS: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    V_PANELS: gl.constexpr = memory.v.shape[0]
    PANEL_BYTES: gl.constexpr = q_desc.block_type.nbytes  # of queries as of keys
    STATISTIC_BYTES: gl.constexpr = lse_desc.block_type.nbytes
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    slot = 0
    phase = 1
    do_slot = 0
    do_phase = 1
    kv_phase = 1
    tile_slot = 0
    tile_phase = 1
    if counts_all_tiles(FORM):
        tile = next_tile(counter, key_tiles, sizes, BLOCK_N, CAUSAL, FORM)
        tile_slot, tile_phase = publish(tile, ends.ring, tile_slot, tile_phase)
    else:
        tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, CAUSAL, FORM)
        n0 = n * BLOCK_N
        entry = batch_head // num_heads_kv
        head_kv = batch_head % num_heads_kv
        begin_q, len_q = sequence(sizes.cu_q, entry, seqlen_q, FORM)
        begin_k, len_k = sequence(sizes.cu_k, entry, seqlen_k, FORM)
        above, below = bounds_of(sizes.upper, sizes.lower, len_q, len_k, FORM)
        first, _low, _high, end, _seen = query_range(n0, len_q, len_k, above, below, BLOCK_M, BLOCK_N, FORM)
        for member in range(group_size):
            head = head_kv * group_size + member
            stat_row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, FORM
            )  # fmt: skip
            for m in range(first, end, BLOCK_M):
                mbarrier.wait(memory.q_empty.index(slot), phase)
                full = memory.q_full.index(slot)
                mbarrier.expect(full, PANELS * PANEL_BYTES + STATISTIC_BYTES)
                copy_panels(q_desc, entry, head, m, begin_q, len_q, full, memory.q, slot, PANELS, FORM)
                copy_in(lse_desc, [stat_row + m], full, memory.lse.index(slot))
                if (m == first) & (member == 0):  # right behind the first Q
                    mbarrier.wait(ends.kv_empty, kv_phase)
                    mbarrier.expect(ends.kv_full, (PANELS + V_PANELS) * PANEL_BYTES)
                    copy_panels(k_desc, entry, head_kv, n0, begin_k, len_k, ends.kv_full, memory.k, 0, PANELS, FORM)
                    copy_panels(v_desc, entry, head_kv, n0, begin_k, len_k, ends.kv_full, memory.v, 0, V_PANELS, FORM)
                    kv_phase ^= 1
                mbarrier.wait(memory.do_empty.index(do_slot), do_phase)
                do_full = memory.do_full.index(do_slot)
                mbarrier.expect(do_full, V_PANELS * PANEL_BYTES + STATISTIC_BYTES)
                copy_panels(do_desc, entry, head, m, begin_q, len_q, do_full, memory.do, do_slot, V_PANELS, FORM)
                copy_in(delta_desc, [stat_row + m], do_full, memory.delta.index(do_slot))
                slot, phase = advance(slot, phase, OPTIONS.STAGES)
                do_slot, do_phase = advance(do_slot, do_phase, OPTIONS.DO_STAGES)
        if OPTIONS.PERSISTENT:
            tile = next_tile(counter, key_tiles, sizes, BLOCK_N, CAUSAL, FORM)
            tile_slot, tile_phase = publish(tile, ends.ring, tile_slot, tile_phase)
        else:
            tile = key_tiles * batch_heads


@gluon.jit(do_not_specialize=[*SIZES, *BOUNDS])
def flash_bwd_hopper_wide_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, scale, scale_log2,
    seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group, rows, upper, lower, cap_in, cu_q, cu_k,
    turns,
    PANELS: gl.constexpr, V_PANELS: gl.constexpr, STAGES: gl.constexpr, DO_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    FOLD_LSE: gl.constexpr, FOLD_DELTA: gl.constexpr, NAMED: gl.constexpr, PERSISTENT: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Arguments as of `flash_bwd_hopper_kernel`, but all blocks of tensors are panels of 64 rows and 64 columns, and
    the sums of dq have PANELS of them for every 64 queries. V_PANELS: of values and outputs. FORM is not zero."""
    dtype: gl.constexpr = q_desc.dtype
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    BLOCK: gl.constexpr = q_desc.block_type.shape[RANK - 2]
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # [PANELS, BLOCK_N, 64]
    k_smem = gl.allocate_shared_memory(dtype, [PANELS, BLOCK, 64], TILE_L)
    # [V_PANELS, BLOCK_N, 64]
    v_smem = gl.allocate_shared_memory(dtype, [V_PANELS, BLOCK, 64], TILE_L)
    # [STAGES * PANELS, BLOCK_M, 64]
    q_smem = gl.allocate_shared_memory(dtype, [STAGES * PANELS, BLOCK, 64], TILE_L)
    # [DO_STAGES * V_PANELS, BLOCK_M, 64]
    do_smem = gl.allocate_shared_memory(dtype, [DO_STAGES * V_PANELS, BLOCK, 64], TILE_L)
    # [BLOCK_N, BLOCK_M]
    ds_smem = gl.allocate_shared_memory(dtype, [BLOCK, BLOCK], TILE_L)
    p_smem = gl.allocate_shared_memory(gl.float32, [64, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # [2, BLOCK_M, 64]
    dq_smem = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)  # noqa: RUF005
    # [STAGES, BLOCK_M]
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse_desc.layout)
    # [DO_STAGES, BLOCK_M]
    delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], delta_desc.layout)
    tile_numbers = new_tile_numbers()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    memory = WideMemory(
        k=k_smem,
        v=v_smem,
        q=q_smem,
        do=do_smem,
        lse=lse_smem,
        delta=delta_smem,
        p=p_smem,
        ds=ds_smem,
        dq=dq_smem,
        q_full=new_barriers(STAGES),
        q_empty=new_barriers(STAGES),
        do_full=new_barriers(DO_STAGES),
        do_empty=new_barriers(DO_STAGES),
        exchanged=new_barriers(2),
    )
    ends = Ends(kv_full=kv_full, kv_empty=kv_empty, ring=new_tile_ring(tile_numbers))
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        open_slot(memory.q_full, memory.q_empty, i, 2)
    for i in gl.static_range(DO_STAGES):
        open_slot(memory.do_full, memory.do_empty, i, 2)
    for i in gl.static_range(2):
        mbarrier.init(memory.exchanged.index(i), count=1)
        open_slot(ends.ring.full, ends.ring.empty, i, 2)
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
    OPTIONS: gl.constexpr = WideOptions(
        STAGES=STAGES,
        DO_STAGES=DO_STAGES,
        CAUSAL=CAUSAL,
        FOLD_LSE=FOLD_LSE,
        FOLD_DELTA=FOLD_DELTA,
        NAMED=NAMED,
        PERSISTENT=PERSISTENT,
        FORM=FORM,
    )
    gl.warp_specialize([
        (wide_consumer, (steps, ends, sizes, dv_desc, scale, turns, 0, OPTIONS)),
        (wide_consumer, (steps, ends, sizes, dk_desc, scale, turns, 1, OPTIONS)),
        (wide_producer, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, counter, ends, sizes, OPTIONS)),
    ], [4, 1], [240, 24])  # fmt: skip
