"""The Hopper attention backward for keys of up to 192 columns and values of up to 128, in Gluon: 64 of 128 keys each.

dK and dV of 64 keys take 160 registers of a warpgroup, which leaves room for one product of 64 keys and 64 queries at a
time. Next to tiles of 64 keys (wide/warps.py), each key adds half as much to the sums of dq, P stays in registers, and
a step reads half as much of Q and dO. Heads are panels of 64 columns. dQ of a step has three, one and a half for each
warpgroup.

What makes it fast, and is easily lost when the code changes:

1. A step never has more than 64 registers next to the gradients. Otherwise ptxas runs the products one by one (C7512):
   dV is issued ahead of dP, so that float32 P is gone when dP begins, and dS is computed from 16-bit P, which is
   unpacked after a wait (`pin_pairs`). S of the next step is not issued ahead, which would take 16 registers more.
2. dQ of a step leaves through memory of its own, in copies of 32 columns: the warpgroup waits for what left a step ago.
3. There is room for dS of one step. A warpgroup fills its half when the other one's dQ of the step before is complete.
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

from blocktune.kernels.hopper.backward.arguments import Bounds, Steps
from blocktune.kernels.hopper.backward.bounds import (
    block_at,
    bounds_of,
    copy_rows_out,
    head_row,
    locate_keys,
    places_of,
    query_range,
    sequence,
)
from blocktune.kernels.hopper.backward.form import begins_masked, counts_all_tiles, ends_masked
from blocktune.kernels.hopper.backward.steps import asked_of_pairs, head_biases, masked, per_query, probabilities
from blocktune.kernels.hopper.backward.wide.steps import accumulate, hidden_zero
from blocktune.kernels.hopper.common.device_functions import add_out, advance, as_block, in_register_order, reinterpret
from blocktune.kernels.hopper.common.named_barriers import bar_sync
from blocktune.kernels.hopper.common.slots import receive

# mypy: disable-error-code="assignment,var-annotated"


@gluon.jit
def product_of_half(a, b, slot, acc, W: gl.constexpr, FOLD: gl.constexpr):
    """a b^T over all panels, of this warpgroup's rows of a and b's rows in a slot, on top of `acc` if FOLD; not waited
    for."""
    PANELS: gl.constexpr = a.shape[0]
    KEYS: gl.constexpr = a.shape[1] // 2
    start = hidden_zero()
    for panel in gl.static_range(PANELS):
        keys = a.index(start + panel).slice(W * KEYS, KEYS, dim=0)
        queries = b.index(slot * PANELS + panel).permute((1, 0))
        acc = warpgroup_mma(keys, queries, acc, use_acc=FOLD or panel > 0, is_async=True)
    return acc


@gluon.jit
def issue_part(ds, k_smem, panel: gl.constexpr, begin: gl.constexpr, DQ_L: gl.constexpr):
    """dQ of the columns of a panel from `begin` on, as many as DQ_L has; not waited for."""
    COLUMNS: gl.constexpr = DQ_L.instr_shape[1]
    # [BLOCK_M, COLUMNS]
    columns = k_smem.index(hidden_zero() + panel).slice(begin, COLUMNS, dim=1)
    zeros = gl.zeros([64, COLUMNS], gl.float32, DQ_L)
    return warpgroup_mma(ds.permute((1, 0)), columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def give_whole(dq, memory, dq_desc, row, W: gl.constexpr):
    """Adds a whole panel of dQ of 64 queries from `row` on to the sums, by two copies."""
    PLACE: gl.constexpr = 4 * W
    # [2, 32, 64]
    both = gl.reshape(in_register_order(dq), [2, 32, 64])
    # [32, 64]
    low, high = gl.split(gl.permute(both, (1, 2, 0)))
    tma.store_wait(1)
    memory.dq.index(PLACE).store(low)
    memory.dq.index(PLACE + 1).store(high)
    fence_async_shared()
    add_out(dq_desc, [row // 64 * 192 + PLACE * 32, 0], memory.dq.index(PLACE))
    add_out(dq_desc, [row // 64 * 192 + PLACE * 32 + 32, 0], memory.dq.index(PLACE + 1))


@gluon.jit
def give_half(dq, memory, dq_desc, row, W: gl.constexpr):
    """Adds half a panel of dQ of 64 queries from `row` on to the sums."""
    PLACE: gl.constexpr = 2 + W
    # [32, 64]
    x = in_register_order(dq)
    tma.store_wait(2)
    memory.dq.index(PLACE).store(x)
    fence_async_shared()
    add_out(dq_desc, [row // 64 * 192 + PLACE * 32, 0], memory.dq.index(PLACE))


@gluon.jit
def pin_pairs(x):
    """16-bit x, used by no instruction: it is computed ahead of what follows (`pin`)."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def step_of_half(
    steps, dk, dv, m, n0, row, bounds, slot, phase, parity,
    W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """One block of queries from m on."""
    memory = steps.memory
    KEYS: gl.constexpr = memory.k.shape[1] // 2
    P_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    HALF_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    # [KEYS, BLOCK_M]
    asked = asked_of_pairs(steps, m, OPTIONS, S_L)
    mbarrier.wait(memory.q_full.index(slot), phase)
    start = per_query(memory.lse.index(slot), -1.0 / steps.scale_log2, OPTIONS.FOLD_LSE, KEYS, S_L)
    s_t = product_of_half(memory.k, memory.q, slot, start, W, OPTIONS.FOLD_LSE)
    s = warpgroup_mma_wait(0, deps=(s_t,))
    p = probabilities(s, steps, slot, m, asked, OPTIONS, S_L)
    p = masked(p, m, n0 + W * KEYS, bounds, asked, MASK, OPTIONS, S_L).to(memory.k.dtype)
    mbarrier.wait(memory.do_full.index(slot), phase)
    # panels [KEYS, 64]
    dv_t = accumulate(dv, gl.convert_layout(p, P_L), memory.do, slot, 2)
    # [KEYS, BLOCK_M]
    start = per_query(memory.delta.index(slot), -1.0, OPTIONS.FOLD_DELTA, KEYS, S_L)
    dp_t = product_of_half(memory.v, memory.do, slot, start, W, OPTIONS.FOLD_DELTA)
    v0, v1, dp = warpgroup_mma_wait(0, deps=(dv_t[0], dv_t[1], dp_t))
    mbarrier.wait(memory.exchanged.index(1 - W), parity ^ 1)
    p = pin_pairs(p).to(gl.float32)
    if not OPTIONS.FOLD_DELTA:
        dp = dp - memory.delta.index(slot).load(gl.SliceLayout(0, S_L))[None, :]
    ds = (p * dp).to(memory.k.dtype)
    memory.ds.slice(W * KEYS, KEYS, dim=0).store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, P_L)
    bar_sync(8, 256)  # dS of both
    mbarrier.arrive(memory.do_empty.index(slot), count=1)
    # [BLOCK_M, 64] and [BLOCK_M, 32], panels [KEYS, 64]
    whole_t = issue_part(memory.ds, memory.k, 2 * W, 0, S_L)
    dk_t = accumulate(dk, ds_low, memory.q, slot, 3)
    whole = warpgroup_mma_wait(3, deps=(whole_t,))
    give_whole(whole, memory, steps.dq_desc, row + m, W)
    half_t = issue_part(memory.ds, memory.k, 1, 32 * W, HALF_L)
    dk = warpgroup_mma_wait(1, deps=dk_t)
    mbarrier.arrive(memory.q_empty.index(slot), count=1)
    half = warpgroup_mma_wait(0, deps=(half_t,))
    mbarrier.arrive(memory.exchanged.index(W), count=1)
    give_half(half, memory, steps.dq_desc, row + m, W)
    slot, phase = advance(slot, phase, OPTIONS.STAGES)
    return dk, (v0, v1), slot, phase, parity ^ 1


@gluon.jit
def head_of_half(
    steps, dk, dv, n0, row, first, low, high, end, bounds, slot, phase, parity,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of one head that see the keys from n0 on."""
    FORM: gl.constexpr = OPTIONS.FORM
    BLOCK_M: gl.constexpr = steps.memory.q.shape[1]
    low, high = places_of(first, low, high, end, FORM)
    if begins_masked(FORM):
        for place in range(first, low, BLOCK_M):
            m = block_at(place, first, end, BLOCK_M, FORM)
            dk, dv, slot, phase, parity = step_of_half(
                steps, dk, dv, m, n0, row, bounds, slot, phase, parity, W, True, OPTIONS, S_L
            )  # fmt: skip
    for place in range(low, high, BLOCK_M):
        m = block_at(place, first, end, BLOCK_M, FORM)
        dk, dv, slot, phase, parity = step_of_half(
            steps, dk, dv, m, n0, row, bounds, slot, phase, parity, W, False, OPTIONS, S_L
        )  # fmt: skip
    if ends_masked(FORM):
        for place in range(high, end, BLOCK_M):
            m = block_at(place, first, end, BLOCK_M, FORM)
            dk, dv, slot, phase, parity = step_of_half(
                steps, dk, dv, m, n0, row, bounds, slot, phase, parity, W, True, OPTIONS, S_L
            )  # fmt: skip
    return dk, dv, slot, phase, parity


@gluon.jit
def consumer_of_half(
    steps, ends, sizes, dk_desc, dv_desc, scale, W: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dK and dV of keys 64 W .. 64 W + 63 of every tile of this block, and a half of the tile's part of dQ."""
    memory = steps.memory
    FORM: gl.constexpr = OPTIONS.FORM
    dtype: gl.constexpr = memory.k.dtype
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    KEYS: gl.constexpr = BLOCK_N // 2
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    # [3, KEYS, 64]
    staging = reinterpret(memory.dq.index(3 * W), dtype, [3, KEYS, 64], GRADIENT_L)  # they leave where dQ does
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    slot = 0
    phase = 0
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
        first, low, high, end, _seen = query_range(n0, len_q, len_k, above, below, BLOCK_M, BLOCK_N, FORM)
        bounds = Bounds(upper=above, lower=below, queries=len_q, keys=len_k)
        # panels [KEYS, 64]
        zeros = gl.zeros([KEYS, 64], gl.float32, S_L)
        dk = (zeros, zeros, zeros)
        dv = (zeros, zeros)
        mbarrier.wait(ends.kv_full, kv_phase)
        kv_phase ^= 1
        for member in range(group_size):
            row = head_row(
                batch_head, member, num_heads_kv, group_size, begin_q, seqlen_q, sizes.rows, BLOCK_M, True, FORM
            )
            own = Steps(
                dq_desc=steps.dq_desc,
                dq_sums=None,
                memory=memory,
                scale_log2=steps.scale_log2,
                cap_in=steps.cap_in,
                biases=steps.biases,
                head=head_biases(steps, batch_head, member, n0 + W * KEYS, bounds, sizes, OPTIONS, S_L),
            )
            dk, dv, slot, phase, parity = head_of_half(
                own, dk, dv, n0, row, first, low, high, end, bounds, slot, phase, parity, W, OPTIONS, S_L
            )  # fmt: skip
        if OPTIONS.PERSISTENT:
            mbarrier.arrive(ends.kv_empty, count=1)
            tile, tile_slot, tile_phase = receive(ends.ring, tile_slot, tile_phase)
        else:
            tile = key_tiles * batch_heads
        head = batch_head % num_heads_kv
        key = n0 + W * KEYS
        tma.store_wait(0)
        for panel in gl.static_range(2):
            staging.index(panel).store(dv[panel].to(dtype))
        staging.index(2).store((dk[0] * scale).to(dtype))
        fence_async_shared()
        for panel in gl.static_range(2):
            copy_rows_out(
                dv_desc, entry, head, key, panel * 64, begin_k, len_k, as_block(dv_desc, staging.index(panel)), FORM
            )
        copy_rows_out(dk_desc, entry, head, key, 0, begin_k, len_k, as_block(dk_desc, staging.index(2)), FORM)
        tma.store_wait(0)
        for panel in gl.static_range(1, 3):
            staging.index(panel - 1).store((dk[panel] * scale).to(dtype))
        fence_async_shared()
        for panel in gl.static_range(1, 3):
            copy_rows_out(
                dk_desc, entry, head, key, panel * 64, begin_k, len_k, as_block(dk_desc, staging.index(panel - 1)), FORM
            )
    tma.store_wait(0)
