"""The Hopper attention backward for keys of up to 192 columns and values of up to 128, in Gluon: 64 of 128 keys each.

dK and dV of 64 keys take 160 registers of a warpgroup, which leaves room for one product of 64 keys and 64 queries at a
time, and half of one. Next to tiles of 64 keys (wide/warps.py), each key adds half as much to the sums of dq, P stays
in registers, and a step reads half as much of Q and dO. Heads are panels of 64 columns. dQ of a step has three, one and
a half for each warpgroup.

What makes it fast, and is easily lost when the code changes:

1. dQ of a step is computed in the next one. There is room for dS of two steps, so that neither warpgroup waits for the
   other one unless that one is a step late: while one computes a softmax, the products of the other run.
2. A step never has more than 48 accumulators next to the gradients. Otherwise ptxas runs the products one by one
   (C7512): half a panel of dQ is in flight with S, a whole one with dV, and dS is computed from 16-bit P, which is
   unpacked after a wait (`pin_pairs`). S of the next step is not issued ahead, which would take 16 registers more.
3. The first step of a tile, which has no dQ of a step before it, computes one all the same and leaves out the addition
   alone: after a longer branch every warp would wait for its warpgroup once more.
4. Q and dO of a step are released together.

Barriers. A warpgroup writes dS of step j + 1 where that of step j - 1 was, which both have read: it has seen the other
one's half of step j, which is written after the products with dS of step j - 1 were complete.
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

from blocktune.kernels.hopper.backward.arguments import Steps
from blocktune.kernels.hopper.backward.bounds import block_at, places_of
from blocktune.kernels.hopper.backward.form import begins_with_masks, counts_all_tiles, ends_with_masks
from blocktune.kernels.hopper.backward.steps import (
    asked_of_pairs,
    head_biases,
    masked,
    per_query,
    probabilities,
    send_ds,
    wait_ds,
)
from blocktune.kernels.hopper.backward.wide.steps import accumulate, hidden_zero
from blocktune.kernels.hopper.backward.wide.tiles import give_gradient, row_of_head, tile_of_keys
from blocktune.kernels.hopper.common.device_functions import add_out, advance, in_register_order, reinterpret
from blocktune.kernels.hopper.common.slots import first_slot, receive

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
def give_half(dq, memory, dq_desc, place, W: gl.constexpr):
    """Adds half a panel of dQ of 64 queries to the sums from `place` on, once half of what left before is read."""
    # [32, 64]
    x = in_register_order(dq)
    tma.store_wait(1)
    room = memory.dq.index(W).slice(0, 32, dim=0)
    room.store(x)
    fence_async_shared()
    if place >= 0:
        add_out(dq_desc, [place + (2 + W) * 32, 0], room)


@gluon.jit
def give_whole(dq, memory, dq_desc, place, W: gl.constexpr):
    """Adds a whole panel of dQ of 64 queries to the sums from `place` on, by two copies."""
    # [64, 64]
    x = in_register_order(dq)
    tma.store_wait(0)
    memory.dq.index(W).store(x)
    fence_async_shared()
    if place >= 0:
        for half in gl.static_range(2):
            add_out(dq_desc, [place + (4 * W + half) * 32, 0], memory.dq.index(W).slice(half * 32, 32, dim=0))


@gluon.jit
def pin_pairs(x):
    """16-bit x, used by no instruction: it is computed ahead of what follows (`pin`)."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def await_ds(memory, slot, phase, place, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Until dS of the step before the one in `slot` is written, whose dQ belongs to `place`."""
    if place >= 0:
        wait_ds(memory.exchanged, slot ^ 1, phase ^ slot ^ 1, W, OPTIONS)


@gluon.jit
def issue_half(memory, slot, W: gl.constexpr):
    """dQ of the step before the one in `slot`: this warpgroup's half of the second panel; not waited for."""
    HALF_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    return issue_part(memory.ds.index(slot ^ 1), memory.k, 1, 32 * W, HALF_L)


@gluon.jit
def issue_whole(memory, slot, W: gl.constexpr, S_L: gl.constexpr):
    """dQ of the step before the one in `slot`: this warpgroup's whole panel; not waited for."""
    return issue_part(memory.ds.index(slot ^ 1), memory.k, 2 * W, 0, S_L)


@gluon.jit
def step_of_half(
    steps, dk, dv, m, n0, row, bounds, slot, phase, before,
    W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """One block of queries from m on, and dQ of the one before it, which is added to the sums from `before` on."""
    memory = steps.memory
    KEYS: gl.constexpr = memory.k.shape[1] // 2
    P_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    # [KEYS, BLOCK_M] and [BLOCK_M, 32]
    asked = asked_of_pairs(steps, m, OPTIONS, S_L)
    mbarrier.wait(memory.q_full.index(slot), phase)
    start = per_query(memory.lse.index(slot), -1.0 / steps.scale_log2, OPTIONS.FOLD_LSE, KEYS, S_L)
    s_t = product_of_half(memory.k, memory.q, slot, start, W, OPTIONS.FOLD_LSE)
    await_ds(memory, slot, phase, before, W, OPTIONS)
    half_t = issue_half(memory, slot, W)
    s = warpgroup_mma_wait(1, deps=(s_t,))
    p = probabilities(s, steps, slot, m, asked, OPTIONS, S_L)
    p = masked(p, m, n0 + W * KEYS, bounds, asked, MASK, OPTIONS, S_L).to(memory.k.dtype)
    half = warpgroup_mma_wait(0, deps=(half_t,))
    give_half(half, memory, steps.dq_desc, before, W)
    mbarrier.wait(memory.do_full.index(slot), phase)
    # [BLOCK_M, 64], panels [KEYS, 64]
    whole_t = issue_whole(memory, slot, W, S_L)
    dv_t = accumulate(dv, gl.convert_layout(p, P_L), memory.do, slot, 2)
    whole = warpgroup_mma_wait(2, deps=(whole_t,))
    give_whole(whole, memory, steps.dq_desc, before, W)
    # [KEYS, BLOCK_M]
    start = per_query(memory.delta.index(slot), -1.0, OPTIONS.FOLD_DELTA, KEYS, S_L)
    dp_t = product_of_half(memory.v, memory.do, slot, start, W, OPTIONS.FOLD_DELTA)
    v0, v1, dp = warpgroup_mma_wait(0, deps=(dv_t[0], dv_t[1], dp_t))
    p = pin_pairs(p).to(gl.float32)
    if not OPTIONS.FOLD_DELTA:
        dp = dp - memory.delta.index(slot).load(gl.SliceLayout(0, S_L))[None, :]
    ds = (p * dp).to(memory.k.dtype)
    memory.ds.index(slot).slice(W * KEYS, KEYS, dim=0).store(ds)
    fence_async_shared()
    send_ds(memory.exchanged, slot, W, OPTIONS)
    # panels [KEYS, 64]
    dk = warpgroup_mma_wait(0, deps=accumulate(dk, gl.convert_layout(ds, P_L), memory.q, slot, 3))
    mbarrier.arrive(memory.q_empty.index(slot), count=1)
    slot, phase = advance(slot, phase, OPTIONS.STAGES)
    return dk, (v0, v1), slot, phase, (row + m) * memory.k.shape[0]


@gluon.jit
def last_of_half(steps, slot, phase, place, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """dQ of a tile's last block of queries. slot: of the step that comes next."""
    memory = steps.memory
    await_ds(memory, slot, phase, place, W, OPTIONS)
    half_t = issue_half(memory, slot, W)
    whole_t = issue_whole(memory, slot, W, S_L)
    half = warpgroup_mma_wait(1, deps=(half_t,))
    give_half(half, memory, steps.dq_desc, place, W)
    whole = warpgroup_mma_wait(0, deps=(whole_t,))
    give_whole(whole, memory, steps.dq_desc, place, W)


@gluon.jit
def head_of_half(
    steps, dk, dv, tile, row, slot, phase, before, W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr
):  # fmt: skip
    """All blocks of queries of one head that see the tile's keys."""
    BLOCK_M: gl.constexpr = steps.memory.q.shape[1]
    first, end = tile.first, tile.end
    low, high = places_of(first, tile.low, tile.high, end, tile.back, OPTIONS)
    if begins_with_masks(OPTIONS):
        for place in range(first, low, BLOCK_M):
            m = block_at(place, first, end, tile.back, BLOCK_M, OPTIONS)
            dk, dv, slot, phase, before = step_of_half(
                steps, dk, dv, m, tile.n0, row, tile.bounds, slot, phase, before, W, True, OPTIONS, S_L
            )  # fmt: skip
    for place in range(low, high, BLOCK_M):
        m = block_at(place, first, end, tile.back, BLOCK_M, OPTIONS)
        dk, dv, slot, phase, before = step_of_half(
            steps, dk, dv, m, tile.n0, row, tile.bounds, slot, phase, before, W, False, OPTIONS, S_L
        )  # fmt: skip
    if ends_with_masks(OPTIONS):
        for place in range(high, end, BLOCK_M):
            m = block_at(place, first, end, tile.back, BLOCK_M, OPTIONS)
            dk, dv, slot, phase, before = step_of_half(
                steps, dk, dv, m, tile.n0, row, tile.bounds, slot, phase, before, W, True, OPTIONS, S_L
            )  # fmt: skip
    return dk, dv, slot, phase, before


@gluon.jit
def consumer_of_half(
    steps, ends, sizes, dk_desc, dv_desc, scale, W: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dK and dV of keys 64 W .. 64 W + 63 of every tile of this block, and a half of the tile's part of dQ."""
    memory = steps.memory
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    KEYS: gl.constexpr = BLOCK_N // 2
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    # [2, KEYS, 64]
    staging = reinterpret(memory.dq.index(W), memory.k.dtype, [2, KEYS, 64], GRADIENT_L)  # they leave where dQ does
    key_tiles = (sizes.seqlen_k + BLOCK_N - 1) // BLOCK_N
    slot = 0
    phase = 0
    kv_phase = 0
    tile_slot = first_slot(0)
    if counts_all_tiles(OPTIONS):
        number, tile_slot = receive(ends.ring, tile_slot)
    else:
        number = gl.program_id(0)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, sizes, BLOCK_M, BLOCK_N, OPTIONS)
        key = tile.n0 + W * KEYS
        # panels [KEYS, 64]
        zeros = gl.zeros([KEYS, 64], gl.float32, S_L)
        dk = (zeros, zeros, zeros)
        dv = (zeros, zeros)
        mbarrier.wait(ends.kv_full, kv_phase)
        kv_phase ^= 1
        before = -1
        for member in range(sizes.group_size):
            row = row_of_head(tile, member, sizes, BLOCK_M, OPTIONS)
            own = Steps(
                dq_desc=steps.dq_desc,
                dq_sums=None,
                memory=memory,
                scale_log2=steps.scale_log2,
                cap_in=steps.cap_in,
                biases=steps.biases,
                head=head_biases(steps, tile.batch_head, member, key, tile.bounds, sizes, OPTIONS, S_L),
            )
            dk, dv, slot, phase, before = head_of_half(
                own, dk, dv, tile, row, slot, phase, before, W, OPTIONS, S_L
            )  # fmt: skip
        last_of_half(steps, slot, phase, before, W, OPTIONS, S_L)
        if OPTIONS.PERSISTENT:
            mbarrier.arrive(ends.kv_empty, count=1)
            number, tile_slot = receive(ends.ring, tile_slot)
        else:
            number = key_tiles * sizes.batch_heads
        tma.store_wait(0)
        for panel in gl.static_range(2):
            give_gradient(dv[panel], dv_desc, tile, key, staging.index(1 - panel), panel, OPTIONS)
        for panel in gl.static_range(3):
            give_gradient(dk[panel] * scale, dk_desc, tile, key, staging.index(1 - panel % 2), panel, OPTIONS)
    tma.store_wait(0)
