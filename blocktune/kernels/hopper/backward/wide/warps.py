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
4. In a fixed order of additions two warps of their own wait for the tile's turn and pass it on (turns.py); the
   warpgroups add the panels, as in any order. A step reports those of the step before when they are added without a
   wait: 0 during dV, 1 while it waits for P. A late panel is added while S runs, not during dV, so that the turn is
   passed on in time: on an H200 1 to 4 % faster.

Barriers. A step has one exchange in each direction, P then dS, so that neither buffer needs a second one: warpgroup 0
writes P of step j + 1 after its wait for dS of step j, which 1 sent after its reading of P; 1 writes dS of step j + 1
after its wait for P of step j + 1, which 0 sent after its products with dS of step j were complete. Both wait in every
step for what the other sends in that step, and a tile has at least one (`query_range`), so that phases agree for one
step as for many. Q, and dO apart from it, are released by both warpgroups in every step (count 2), and the producer
waits for a slot from its second filling on: the parity it starts with lets the first ones pass.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from blocktune.kernels.hopper.backward.arguments import Steps
from blocktune.kernels.hopper.backward.bounds import block_at, copy_rows, next_tile, places_of
from blocktune.kernels.hopper.backward.form import (
    begins_with_masks,
    counts_all_tiles,
    ends_with_masks,
    parts_of_walk,
)
from blocktune.kernels.hopper.backward.steps import head_biases
from blocktune.kernels.hopper.backward.turns import report_added
from blocktune.kernels.hopper.backward.wide.steps import LATE, give_panel, step_of_gradients, step_of_scores
from blocktune.kernels.hopper.backward.wide.tiles import give_gradient, row_of_head, tile_of_keys
from blocktune.kernels.hopper.common.device_functions import advance, as_block, copy_in, reinterpret
from blocktune.kernels.hopper.common.slots import first_slot, publish, receive

# mypy: disable-error-code="assignment,var-annotated"


@gluon.jit
def wide_step(
    steps, gradients, m, first, back, n0, row, bounds, slot, phase, do_slot, do_phase, parity,
    W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """One block of queries from m on, for either warpgroup."""
    if W == 0:
        return step_of_scores(
            steps, gradients, m, first, back, n0, row, bounds, slot, phase, do_slot, do_phase, parity,
            MASK, OPTIONS, S_L,
        )  # fmt: skip
    else:
        return step_of_gradients(
            steps, gradients, m, first, row, slot, phase, do_slot, do_phase, parity, OPTIONS, S_L,
        )  # fmt: skip


@gluon.jit
def wide_head(
    steps, gradients, kv_empty, last, n0, row, first, low, high, end, back, bounds,
    slot, phase, do_slot, do_phase, parity,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries of one head that see the keys from n0 on; only P is masked, and only in warpgroup 0. In a
    fixed order of additions the walk may go back (`block_at`)."""
    memory = steps.memory
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    PANELS: gl.constexpr = memory.k.shape[0]
    if W == 1:
        low = first + 0
        high = end + 0
    low, high = places_of(first, low, high, end, back, OPTIONS)
    start = block_at(first, first, end, back, BLOCK_M, OPTIONS)
    masked, whole, stop = first, low, high
    for _ in range(parts_of_walk(OPTIONS)):
        if W == 0 and begins_with_masks(OPTIONS):
            for place in range(masked, whole, BLOCK_M):
                m = block_at(place, first, end, back, BLOCK_M, OPTIONS)
                gradients, slot, phase, do_slot, do_phase, parity = wide_step(
                    steps, gradients, m, start, back, n0, row, bounds, slot, phase, do_slot, do_phase, parity,
                    W, True, OPTIONS, S_L,
                )  # fmt: skip
        for place in range(whole, stop, BLOCK_M):
            m = block_at(place, first, end, back, BLOCK_M, OPTIONS)
            gradients, slot, phase, do_slot, do_phase, parity = wide_step(
                steps, gradients, m, start, back, n0, row, bounds, slot, phase, do_slot, do_phase, parity,
                W, False, OPTIONS, S_L,
            )  # fmt: skip
        masked, whole, stop = high, end, end
    if W == 0 and ends_with_masks(OPTIONS):
        for place in range(high, end, BLOCK_M):
            m = block_at(place, first, end, back, BLOCK_M, OPTIONS)
            gradients, slot, phase, do_slot, do_phase, parity = wide_step(
                steps, gradients, m, start, back, n0, row, bounds, slot, phase, do_slot, do_phase, parity,
                W, True, OPTIONS, S_L,
            )  # fmt: skip
    if OPTIONS.PERSISTENT:
        mbarrier.arrive(kv_empty, count=1, pred=last)
    if W == 0 and PANELS == LATE:
        last_block = block_at(end - BLOCK_M, first, end, back, BLOCK_M, OPTIONS)
        give_panel(gradients[memory.v.shape[0]], steps, row + last_block, 0, 1, PANELS)
    if OPTIONS.ORDERED:
        report_added(parity ^ 1, 1)
    return gradients, slot, phase, do_slot, do_phase, parity


@gluon.jit
def wide_consumer(
    steps, ends, sizes, gradient_desc, scale, W: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dV (W 0) or dK (W 1) of every tile of this block, and a part of the tile's dQ."""
    memory = steps.memory
    dtype: gl.constexpr = memory.k.dtype
    PANELS: gl.constexpr = memory.k.shape[0]
    OWN_PANELS: gl.constexpr = memory.v.shape[0] if W == 0 else PANELS
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    # [2, BLOCK_N, 64]
    staging = reinterpret(memory.dq.index(W), dtype, [2, BLOCK_N, 64], GRADIENT_L)  # they leave where dQ does
    key_tiles = (sizes.seqlen_k + BLOCK_N - 1) // BLOCK_N
    slot = 0
    phase = 0
    do_slot = 0
    do_phase = 0
    parity = 0
    kv_phase = 0
    tile_slot = first_slot(0)
    if counts_all_tiles(OPTIONS):
        number, tile_slot = receive(ends.ring, tile_slot)
    else:
        number = gl.program_id(0)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, sizes, BLOCK_M, BLOCK_N, OPTIONS)
        # panels [BLOCK_N, 64]
        gradients = ()
        for _ in gl.static_range(OWN_PANELS + 1 if W == 0 and PANELS == LATE else OWN_PANELS):
            gradients = gradients + (gl.zeros([BLOCK_N, 64], gl.float32, S_L),)  # noqa: RUF005
        mbarrier.wait(ends.kv_full, kv_phase)
        kv_phase ^= 1
        for member in range(sizes.group_size):
            row = row_of_head(tile, member, sizes, BLOCK_M, OPTIONS)
            own = Steps(
                dq_desc=steps.dq_desc,
                dq_sums=None,
                memory=memory,
                scale_log2=steps.scale_log2,
                cap_in=steps.cap_in,
                biases=steps.biases,
                head=head_biases(steps, tile.batch_head, member, tile.n0, tile.bounds, sizes, OPTIONS, S_L),
            )
            gradients, slot, phase, do_slot, do_phase, parity = wide_head(
                own, gradients, ends.kv_empty, member == sizes.group_size - 1, tile.n0, row,
                tile.first, tile.low, tile.high, tile.end, tile.back, tile.bounds,
                slot, phase, do_slot, do_phase, parity,
                W, OPTIONS, S_L,
            )  # fmt: skip
        if OPTIONS.PERSISTENT:
            number, tile_slot = receive(ends.ring, tile_slot)
        else:
            number = key_tiles * sizes.batch_heads
        tma.store_wait(0)
        for panel in gl.static_range(OWN_PANELS):
            gradient = gradients[panel]
            if W == 1:
                gradient = gradient * scale
            give_gradient(gradient, gradient_desc, tile, tile.n0, staging.index(panel % 2), panel, OPTIONS)
    tma.store_wait(0)


@gluon.jit
def copy_panels(
    desc, entry, head, row, begin, length, barrier, memory, slot, PANELS: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """All panels of 64 rows, into a slot."""
    for panel in gl.static_range(PANELS):
        tile = as_block(desc, memory.index(slot * PANELS + panel))
        copy_rows(desc, entry, head, row, panel * 64, begin, length, barrier, tile, OPTIONS)


@gluon.jit
def copy_keys(desc, tile, barrier, memory, OPTIONS: gl.constexpr):
    """All panels of the tile's keys or values."""
    PANELS: gl.constexpr = memory.shape[0]
    begin, length = tile.begin_k, tile.bounds.keys
    copy_panels(desc, tile.entry, tile.head, tile.n0, begin, length, barrier, memory, 0, PANELS, OPTIONS)


@gluon.jit
def wide_producer(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, counter, ends, sizes, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Copies K and V of every tile of this block, Q, dO and their statistics of every step; fetches the next tiles."""
    PANELS: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    V_PANELS: gl.constexpr = memory.v.shape[0]
    PANEL_BYTES: gl.constexpr = q_desc.block_type.nbytes
    KEY_BYTES: gl.constexpr = k_desc.block_type.nbytes
    STATISTIC_BYTES: gl.constexpr = lse_desc.block_type.nbytes
    key_tiles = (sizes.seqlen_k + BLOCK_N - 1) // BLOCK_N
    slot = 0
    phase = 1
    do_slot = 0
    do_phase = 1
    kv_phase = 1
    tile_slot = first_slot(1)
    if counts_all_tiles(OPTIONS):
        number = next_tile(counter, key_tiles, sizes, BLOCK_N, OPTIONS)
        tile_slot = publish(number, ends.ring, tile_slot)
    else:
        number = gl.program_id(0)
    while number < key_tiles * sizes.batch_heads:
        tile = tile_of_keys(number, key_tiles, sizes, BLOCK_M, BLOCK_N, OPTIONS)
        entry, begin_q, len_q = tile.entry, tile.begin_q, tile.bounds.queries
        for member in range(sizes.group_size):
            head = tile.head * sizes.group_size + member
            stat_row = row_of_head(tile, member, sizes, BLOCK_M, OPTIONS)
            for place in range(tile.first, tile.end, BLOCK_M):
                m = block_at(place, tile.first, tile.end, tile.back, BLOCK_M, OPTIONS)
                mbarrier.wait(memory.q_empty.index(slot), phase)
                full = memory.q_full.index(slot)
                mbarrier.expect(full, PANELS * PANEL_BYTES + STATISTIC_BYTES)
                copy_panels(q_desc, entry, head, m, begin_q, len_q, full, memory.q, slot, PANELS, OPTIONS)
                copy_in(lse_desc, [stat_row + m], full, memory.lse.index(slot))
                if (place == tile.first) & (member == 0):  # right behind the first Q
                    mbarrier.wait(ends.kv_empty, kv_phase)
                    mbarrier.expect(ends.kv_full, (PANELS + V_PANELS) * KEY_BYTES)
                    copy_keys(k_desc, tile, ends.kv_full, memory.k, OPTIONS)
                    copy_keys(v_desc, tile, ends.kv_full, memory.v, OPTIONS)
                    kv_phase ^= 1
                mbarrier.wait(memory.do_empty.index(do_slot), do_phase)
                do_full = memory.do_full.index(do_slot)
                mbarrier.expect(do_full, V_PANELS * PANEL_BYTES + STATISTIC_BYTES)
                copy_panels(do_desc, entry, head, m, begin_q, len_q, do_full, memory.do, do_slot, V_PANELS, OPTIONS)
                copy_in(delta_desc, [stat_row + m], do_full, memory.delta.index(do_slot))
                slot, phase = advance(slot, phase, OPTIONS.STAGES)
                do_slot, do_phase = advance(do_slot, do_phase, OPTIONS.DO_STAGES)
        if OPTIONS.PERSISTENT:
            number = next_tile(counter, key_tiles, sizes, BLOCK_N, OPTIONS)
            tile_slot = publish(number, ends.ring, tile_slot)
        else:
            number = key_tiles * sizes.batch_heads
