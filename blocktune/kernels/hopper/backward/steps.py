"""One step of the Hopper attention backward, in Gluon: a block of queries against 64 keys of a warpgroup.

warps.py says what makes it fast.
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

from blocktune.kernels.hopper.backward.adders import await_place, give_dq, place_of
from blocktune.kernels.hopper.backward.bounds import copy_rows_out, keep_seen
from blocktune.kernels.hopper.biases.of_keys import (
    biases_of_head,
    is_biased,
    kept_of_queries,
    mask_of_block,
    slopes_where_kept,
    where_kept,
    where_seen,
    with_biases,
)
from blocktune.kernels.hopper.common.device_functions import (
    advance,
    as_block,
    copy_out,
    in_register_order,
    reinterpret,
    tanh,
)
from blocktune.kernels.hopper.common.named_barriers import bar_arrive, bar_sync


# Named barriers: 8 .. 11 dS of warpgroup 0 and 1 in buffer 0 and 1 (256 threads), 12 .. 15 the stages (288 threads:
# the warp that copies too).
@gluon.jit
def send_ds(ds_full, buffer, W: gl.constexpr, OPTIONS: gl.constexpr):
    if OPTIONS.NAMED_EXCHANGE:
        bar_arrive(8 + 2 * W + buffer, 256)
    else:
        mbarrier.arrive(ds_full.index(buffer), count=1)


@gluon.jit
def wait_ds(ds_full, buffer, phase, W: gl.constexpr, OPTIONS: gl.constexpr):
    if OPTIONS.NAMED_EXCHANGE:
        bar_sync(8 + 2 * (1 - W) + buffer, 256)
    else:
        mbarrier.wait(ds_full.index(buffer), phase)


@gluon.jit
def release(empty, slot, OPTIONS: gl.constexpr):
    if OPTIONS.NAMED_RELEASE:
        bar_arrive(12 + slot, 288)
    else:
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def no_products_yet():
    """Waits for products when none was issued.

    Without such a wait ptxas takes accumulators that are filled for the results of earlier products, and lets the first
    loop of a kernel wait for S before it issues dP (its note C7517).
    """
    WAIT: gl.constexpr = "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def per_query(values, factor, on: gl.constexpr, KEYS: gl.constexpr, S_L: gl.constexpr):
    """The initial accumulator of S^T or dP^T: a value for each query; zeros, which are not used, if not `on`."""
    BLOCK_M: gl.constexpr = values.shape[0]
    # [KEYS, BLOCK_M]
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, S_L)
    if on:
        return zeros + (values.load(gl.SliceLayout(0, S_L)) * factor)[None, :]
    else:
        return zeros


@gluon.jit
def head_biases(steps, batch_head, member, key, bounds, sizes, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """`biases_of_head` of the query head number `member` of a key head, for the keys from `key` on."""
    if is_biased(OPTIONS):
        batch = batch_head // sizes.num_heads_kv
        head = batch_head % sizes.num_heads_kv * sizes.group_size + member
        heads = sizes.num_heads_kv * sizes.group_size
        moved = bounds.upper - sizes.upper
        return biases_of_head(
            steps.biases, batch, head, heads, key, bounds.keys, moved, steps.memory.lse.shape[1], OPTIONS, S_L
        )  # fmt: skip
    else:
        return 0


@gluon.jit
def mask_of_pairs(steps, m, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """What queries from m on need to know of a mask tensor; 0 without one."""
    return mask_of_block(steps.biases, steps.head, m, steps.memory.lse.shape[1], OPTIONS, S_L)


@gluon.jit
def asked_of_pairs(steps, m, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """What queries from m on need to know of their pairs: of a mask tensor, and which of them dropout keeps."""
    return mask_of_pairs(steps, m, OPTIONS, S_L), kept_of_queries(steps.biases, steps.head, m, OPTIONS)


@gluon.jit
def probabilities(s, steps, slot, m, asked, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """exp(S^T - lse), of pairs that do not see each other, too."""
    # [KEYS, BLOCK_M]
    x = s * steps.scale_log2
    if not OPTIONS.FOLD_LSE:
        x = x - steps.memory.lse.index(slot).load(gl.SliceLayout(0, S_L))[None, :]
    return gl.exp2(with_biases(x, m, asked[0], steps.head, OPTIONS, S_L))


@gluon.jit
def masked(p, m, key, bounds, asked, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr):
    """p of queries m .. and of this warpgroup's keys `key` .., and 0 for pairs that a boolean mask hides, and if MASK
    for those that do not see each other, whatever it was."""
    # [KEYS, BLOCK_M]
    if MASK and OPTIONS.GENERAL:
        p = keep_seen(p, m, key, bounds, S_L, OPTIONS)
    elif MASK:
        queries = m + gl.arange(0, p.shape[1], gl.SliceLayout(0, S_L))
        keys = key + gl.arange(0, p.shape[0], gl.SliceLayout(1, S_L))
        p = gl.where(queries[None, :] >= keys[:, None], p, 0.0)
    return where_seen(p, asked[0], OPTIONS, S_L)


@gluon.jit
def weigh(
    s, steps, slot, m, key, bounds, asked, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr,
    P_L: gl.constexpr,
):  # fmt: skip
    """P^T of the queries m .. and of this warpgroup's keys `key` .., as an operand, and what dP^T is multiplied with:
    P^T, under a soft cap times its derivative. s: S^T."""
    # [KEYS, BLOCK_M]
    if OPTIONS.SOFTCAP:
        s = tanh(s * steps.cap_in)
    p_all = probabilities(s, steps, slot, m, asked, OPTIONS, S_L)
    p = masked(p_all, m, key, bounds, asked, MASK, OPTIONS, S_L)
    p_low = gl.convert_layout(where_kept(p, asked[1], OPTIONS, S_L).to(steps.memory.k.dtype), P_L)
    if OPTIONS.SOFTCAP:  # masked after the product: a hidden key may leave a derivative of NaN
        p = masked(p_all * (1.0 - s * s), m, key, bounds, asked, MASK, OPTIONS, S_L)
    return p_low, p


@gluon.jit
def issue_dq(kt, k_smem, ds, W: gl.constexpr, DEFER: gl.constexpr, DQ_L: gl.constexpr):
    """This warpgroup's half of dQ of a block of queries; not waited for."""
    D: gl.constexpr = k_smem.shape[1]
    BLOCK_M: gl.constexpr = ds.shape[1]
    if DEFER:  # dQ^T = K^T (registers) dS^T
        # [head_dim, BLOCK_M / 2]
        half = ds.slice(W * (BLOCK_M // 2), BLOCK_M // 2, dim=1)
        zeros = gl.zeros([D, BLOCK_M // 2], gl.float32, DQ_L)
        return warpgroup_mma(kt, half, zeros, use_acc=False, is_async=True)
    else:  # dQ = dS K
        # [BLOCK_M, head_dim / 2]
        half = k_smem.slice(W * (D // 2), D // 2, dim=1)
        zeros = gl.zeros([BLOCK_M, D // 2], gl.float32, DQ_L)
        return warpgroup_mma(ds.permute((1, 0)), half, zeros, use_acc=False, is_async=True)


@gluon.jit
def put_partial(gradient, desc, memory, block):
    """Writes a float32 gradient of 64 keys, which is the block number `block` of its kind, in the order of the
    accumulator registers: one half of its columns after the other."""
    HALF: gl.constexpr = gradient.shape[1] // 2
    # [2, HALF, 64]
    x = gl.reshape(in_register_order(gradient), [2, HALF, 64])
    # [HALF, 64]
    low, high = gl.split(gl.permute(x, (1, 2, 0)))
    tma.store_wait(0)
    memory.store(low)
    fence_async_shared()
    copy_out(desc, [block * 2 * HALF, 0], memory)
    tma.store_wait(0)
    memory.store(high)
    fence_async_shared()
    copy_out(desc, [(block * 2 + 1) * HALF, 0], memory)


@gluon.jit
def put_gradients(
    dk, dv, dk_desc, dv_desc, batch, head, key, begin, length, memory, b, b_phase, W: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """Writes dK and dV of 64 keys from `key` on by way of the two places of dQ, so that none waits for the other. dV
    leaves from where dQ left earlier. b, b_phase: of the step that comes next."""
    GRADIENT_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # [64, head_dim]
    tma.store_wait(0)
    await_place(memory, b, b_phase, W)
    values = reinterpret(memory.dq.index(place_of(memory, b, W)), dv_desc.dtype, dv.shape, GRADIENT_L)
    values.store(dv.to(dv_desc.dtype))
    fence_async_shared()
    copy_rows_out(dv_desc, batch, head, key, 0, begin, length, as_block(dv_desc, values), OPTIONS)
    b, b_phase = advance(b, b_phase, 2)
    await_place(memory, b, b_phase, W)
    keys = reinterpret(memory.dq.index(place_of(memory, b, W)), dk_desc.dtype, dk.shape, GRADIENT_L)
    keys.store(dk.to(dk_desc.dtype))
    fence_async_shared()
    copy_rows_out(dk_desc, batch, head, key, 0, begin, length, as_block(dk_desc, keys), OPTIONS)


@gluon.jit
def step(
    steps, ka, va, kt, dk, dv, m, before, later, n0, row, bounds, slot, phase, b, b_phase,
    W: gl.constexpr, MASK: gl.constexpr, OPTIONS: gl.constexpr, S_L: gl.constexpr, KV_L: gl.constexpr,
    DQ_L: gl.constexpr,
):  # fmt: skip
    """One block of queries from m on; DEFER: dQ belongs to the block before it. b, b_phase: the buffer of dS.

    before: the first query of the block before it, in an order that is not fixed. later: whether the walk began with
    another block. bounds is None where OPTIONS has no use for it.
    """
    memory = steps.memory
    DEFER: gl.constexpr = OPTIONS.DEFER
    FOLD_LSE: gl.constexpr = OPTIONS.FOLD_LSE
    FOLD_DELTA: gl.constexpr = OPTIONS.FOLD_DELTA
    dtype: gl.constexpr = memory.k.dtype
    BLOCK_N: gl.constexpr = memory.k.shape[0]
    KEYS: gl.constexpr = BLOCK_N // 2
    P_L: gl.constexpr = gl.DotOperandLayout(0, KV_L, 2)
    # [KEYS, BLOCK_M]
    mbarrier.wait(memory.q_full.index(slot), phase)
    asked = asked_of_pairs(steps, m, OPTIONS, S_L)
    s_acc = per_query(memory.lse.index(slot), -1.0 / steps.scale_log2, FOLD_LSE, KEYS, S_L)
    s_t = warpgroup_mma(ka, memory.q.index(slot).permute((1, 0)), s_acc, use_acc=FOLD_LSE, is_async=True)
    mbarrier.wait(memory.do_full.index(slot), phase)
    LATE: gl.constexpr = OPTIONS.SOFTCAP  # a soft cap takes the registers that dP would wait in
    if not LATE:
        dp_acc = per_query(memory.delta.index(slot), -1.0, FOLD_DELTA, KEYS, S_L)
        dp_t = warpgroup_mma(va, memory.do.index(slot).permute((1, 0)), dp_acc, use_acc=FOLD_DELTA, is_async=True)
    if DEFER:
        if OPTIONS.NAMED_EXCHANGE:
            if later:
                wait_ds(memory.ds_full, 1 - b, b_phase, W, OPTIONS)
        else:
            mbarrier.wait(memory.ds_full.index(1 - b), b_phase ^ (1 - b), pred=later)
        dq_t = issue_dq(kt, memory.k, memory.ds.index(1 - b), W, DEFER, DQ_L)  # of the first step: thrown away
        s = warpgroup_mma_wait(1 if LATE else 2, deps=(s_t,))
    else:
        s = warpgroup_mma_wait(0 if LATE else 1, deps=(s_t,))
    # as `weigh`, whose call would change what ptxas spills
    if LATE:
        s = tanh(s * steps.cap_in)
    p_all = probabilities(s, steps, slot, m, asked, OPTIONS, S_L)
    p = masked(p_all, m, n0 + W * KEYS, bounds, asked, MASK, OPTIONS, S_L)
    p_low = gl.convert_layout(where_kept(p, asked[1], OPTIONS, S_L).to(dtype), P_L)
    if LATE:  # masked after the product: a hidden key may leave a derivative of NaN
        p = masked(p_all * (1.0 - s * s), m, n0 + W * KEYS, bounds, asked, MASK, OPTIONS, S_L)
        dp_acc = per_query(memory.delta.index(slot), -1.0, FOLD_DELTA, KEYS, S_L)
        dp_t = warpgroup_mma(va, memory.do.index(slot).permute((1, 0)), dp_acc, use_acc=FOLD_DELTA, is_async=True)
    # [KEYS, head_dim]
    dv_t = warpgroup_mma(p_low, memory.do.index(slot), dv, is_async=True)
    if DEFER:
        dp, dq = warpgroup_mma_wait(1, deps=(dp_t, dq_t))
    else:
        dp = warpgroup_mma_wait(1, deps=(dp_t,))
    # [KEYS, BLOCK_M]
    if OPTIONS.DROPOUT:
        slopes = -memory.delta.index(slot).load(gl.SliceLayout(0, S_L))
        dp = slopes_where_kept(dp, asked[1], slopes, OPTIONS, S_L)
    if FOLD_DELTA:
        ds = (p * dp).to(dtype)
    else:
        ds = (p * (dp - memory.delta.index(slot).load(gl.SliceLayout(0, S_L))[None, :])).to(dtype)
    memory.ds.index(b).slice(W * KEYS, KEYS, dim=0).store(ds)
    fence_async_shared()
    ds_low = gl.convert_layout(ds, P_L)
    send_ds(memory.ds_full, b, W, OPTIONS)
    # [KEYS, head_dim], and a half of [BLOCK_M, head_dim]
    if DEFER:
        dk_t = warpgroup_mma(ds_low, memory.q.index(slot), dk, is_async=True)
        if later:
            give_dq(dq, steps, row + before, 1 - b, b_phase ^ (1 - b), W, OPTIONS)
        dv, dk = warpgroup_mma_wait(0, deps=(dv_t, dk_t))
    else:
        wait_ds(memory.ds_full, b, b_phase, W, OPTIONS)
        dq_t = issue_dq(kt, memory.k, memory.ds.index(b), W, DEFER, DQ_L)
        dk_t = warpgroup_mma(ds_low, memory.q.index(slot), dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(dv_t, dq_t))
        give_dq(dq, steps, row + m, b, b_phase, W, OPTIONS)
        dk = warpgroup_mma_wait(0, deps=(dk_t,))
    release(memory.empty, slot, OPTIONS)
    slot, phase = advance(slot, phase, OPTIONS.STAGES)
    b, b_phase = advance(b, b_phase, 2)
    return dk, dv, slot, phase, b, b_phase
