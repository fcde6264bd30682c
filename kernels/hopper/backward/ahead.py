"""A walk of the Hopper attention backward whose scores run ahead, in Gluon: the next S^T is issued while dK runs.

For the plain form under a diagonal at head_dim 128. What makes it fast, and is easily lost when the code changes:

1. The tensor cores never run dry between two steps. Without this a step begins with an empty queue: a wait for dK, then
   statistics, addresses and a barrier ahead of its first product.
2. S^T is complete at the first wait of the next step, whose count is 0. ptxas runs wgmma one by one (C7514) where a
   step reads a product of the step before after a wait that leaves another one in flight.
3. The pass before leaves statistics as the products begin with them (`lse_factor` of `prepare_kernel`): no arithmetic
   between their loads and the product.
4. Addresses of K as an operand are computed in every step (`anew`). LLVM knows them to be the same in all and computes
   them ahead of the loop, where they spill.
5. Warps of their own add dQ (adders.py): the warpgroups wait for memory alone.
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

from blocktune.kernels.hopper.backward.adders import add_halves, receive_alone
from blocktune.kernels.hopper.backward.bounds import count_key_tiles, head_row, locate_keys
from blocktune.kernels.hopper.backward.steps import (
    hand_over,
    issue_dq,
    masked,
    probabilities,
    release,
    send_ds,
    wait_ds,
)
from blocktune.kernels.hopper.backward.wide_steps import hidden_zero
from blocktune.kernels.hopper.common.device_functions import advance, in_register_order, reinterpret


@gluon.jit
def anew(tile):
    """A tile of shared memory, whose address is computed where it stands (`hidden_zero`)."""
    return reinterpret(tile, tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout).index(hidden_zero())


@gluon.jit
def spread(values, KEYS: gl.constexpr, S_L: gl.constexpr):
    """The initial accumulator of S^T or dP^T: a value for each query."""
    # [KEYS, BLOCK_M]
    wide, _ = gl.broadcast(values[None, :], gl.zeros([KEYS, values.shape[0]], gl.float32, S_L))
    return wide


@gluon.jit
def first_slope(memory, slot, phase, S_L: gl.constexpr):
    """What dP^T of the queries in a slot begins with, once they are there."""
    mbarrier.wait(memory.do_full.index(slot), phase)
    return memory.delta.index(slot).load(gl.SliceLayout(0, S_L))


@gluon.jit
def issue_scores(memory, slot, phase, ready, W: gl.constexpr, KEYS: gl.constexpr, S_L: gl.constexpr):
    """S^T of the queries in a slot, which are waited for if `ready`; not waited for itself."""
    mbarrier.wait(memory.q_full.index(slot), phase, pred=ready)
    # [KEYS, BLOCK_M]
    start = spread(memory.lse.index(slot).load(gl.SliceLayout(0, S_L)), KEYS, S_L)
    keys = anew(memory.k).slice(W * KEYS, KEYS, dim=0)
    return warpgroup_mma(keys, memory.q.index(slot).permute((1, 0)), start, is_async=True)


@gluon.jit
def step_ahead(
    steps, s_t, left, dk, dv, m, n0, slot, phase, b, b_phase,
    W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr,
    DQ_L: gl.constexpr,
):  # fmt: skip
    """One block of queries from m on, whose S^T is on its way as s_t. b, b_phase: the buffer of dS.

    left: steps of the tile, this one included. Returns the next step's S^T; after the last one that of whatever lies
    in the slot, to be thrown away.
    """
    memory = steps.memory
    NAMED: gl.constexpr = OPTIONS.NAMED
    KEYS: gl.constexpr = memory.k.shape[0] // 2
    P_L: gl.constexpr = gl.DotOperandLayout(0, KV_L, 2)
    next_slot, next_phase = advance(slot, phase, OPTIONS.STAGES)
    # [KEYS, BLOCK_M]
    start = first_slope(memory, slot, phase, S_L)
    s = warpgroup_mma_wait(0, deps=(s_t,))
    values = memory.v.slice(W * KEYS, KEYS, dim=0)
    dp_t = warpgroup_mma(values, memory.do.index(slot).permute((1, 0)), spread(start, KEYS, S_L), is_async=True)
    p = probabilities(s, memory.lse.index(slot), steps.scale_log2, S_L, True)
    p = masked(p, m, n0 + W * KEYS, None, MASK, S_L, OPTIONS.FORM)
    p_low = gl.convert_layout(p.to(memory.k.dtype), P_L)
    # [KEYS, head_dim]
    dv_t = warpgroup_mma(p_low, memory.do.index(slot), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp_t,))
    # [KEYS, BLOCK_M]
    ds = (p * dp).to(memory.k.dtype)
    memory.ds.index(b).slice(W * KEYS, KEYS, dim=0).store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, P_L)
    send_ds(memory.ds_full, b, W, NAMED)
    wait_ds(memory.ds_full, b, b_phase, W, NAMED)
    # [KEYS, head_dim], and a half of [BLOCK_M, head_dim]
    dq_t = issue_dq(None, anew(memory.k), memory.ds.index(b), W, False, DQ_L)
    dk_t = warpgroup_mma(ds_low, memory.q.index(slot), dk, is_async=True)
    dv, dq = warpgroup_mma_wait(1, deps=(dv_t, dq_t))
    hand_over(in_register_order(dq), memory, b, b_phase, W, AWAIT=False)
    s_t = issue_scores(memory, next_slot, next_phase, left > 1, W, KEYS, S_L)
    dk = warpgroup_mma_wait(1, deps=(dk_t,))
    release(memory.empty, slot, NAMED)
    b, b_phase = advance(b, b_phase, 2)
    return s_t, left - 1, dk, dv, next_slot, next_phase, b, b_phase


@gluon.jit
def walk_ahead(
    steps, dk, dv, n0, seqlen_q, slot, phase, b, b_phase,
    W: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """All blocks of queries that see the keys from n0 on, those on the diagonal first."""
    memory = steps.memory
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    KEYS: gl.constexpr = BLOCK_N // 2
    left = (seqlen_q - n0) // BLOCK_M
    s_t = issue_scores(memory, slot, phase, True, W, KEYS, S_L)
    mbarrier.wait(memory.do_full.index(slot), phase)
    tma.store_wait(0)  # dK and dV of the tile before leave from where dQ does
    for m in range(n0, n0 + BLOCK_N, BLOCK_M):
        s_t, left, dk, dv, slot, phase, b, b_phase = step_ahead(
            steps, s_t, left, dk, dv, m, n0, slot, phase, b, b_phase, W, True, OPTIONS, S_L, KV_L, DQ_L
        )  # fmt: skip
    for m in range(n0 + BLOCK_N, seqlen_q, BLOCK_M):
        s_t, left, dk, dv, slot, phase, b, b_phase = step_ahead(
            steps, s_t, left, dk, dv, m, n0, slot, phase, b, b_phase, W, False, OPTIONS, S_L, KV_L, DQ_L
        )  # fmt: skip
    warpgroup_mma_wait(0, deps=(s_t,))
    return dk, dv, slot, phase, b, b_phase


@gluon.jit
def adder_ahead(memory, dq_desc, ring, sizes, OWN: gl.constexpr, OPTIONS: gl.constexpr):
    """Adds dQ of every second step of this block to the sums, as the warpgroups hand it over.

    OWN: 0 for its first, third, ... step, 1 for the others.
    """
    FORM: gl.constexpr = OPTIONS.FORM
    BLOCK_M: gl.constexpr = memory.q.shape[1]
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    seqlen_q = sizes.seqlen_q
    num_heads_kv, group_size, batch_heads = sizes.num_heads_kv, sizes.group_size, sizes.batch_heads
    key_tiles = count_key_tiles(sizes.seqlen_k, BLOCK_N, FORM)
    others = OWN + 0  # steps of the other warp before the next own one: 0 or 1
    phase = 0
    place = 0
    parity = 0
    tile = gl.program_id(0)
    while tile < key_tiles * batch_heads:
        n, batch_head = locate_keys(tile, key_tiles, sizes.head_group, batch_heads, OPTIONS.CAUSAL, FORM)
        first = n * BLOCK_N
        for member in range(group_size):
            row = head_row(batch_head, member, num_heads_kv, group_size, 0, seqlen_q, None, BLOCK_M, True, FORM)
            for m in range(first + others * BLOCK_M, seqlen_q, 2 * BLOCK_M):
                add_halves(memory, dq_desc, (row + m) // BLOCK_M, phase, OWN)
                phase ^= 1
            others ^= (seqlen_q - first) // BLOCK_M & 1
        tile, place, parity = receive_alone(ring, place, parity)
