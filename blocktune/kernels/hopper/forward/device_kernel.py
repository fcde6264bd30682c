"""The Hopper attention forward, in Gluon: the kernel that shares out memory, barriers and registers among its warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot
from blocktune.kernels.hopper.forward.arguments import Biases, Memory, Options, Sizes
from blocktune.kernels.hopper.forward.consumer import consumer
from blocktune.kernels.hopper.forward.lines import places_of_keys
from blocktune.kernels.hopper.forward.producer import producer

SIZES = ("seqlen_q", "seqlen_k", "num_heads", "group_size", "batch_heads", "head_group", "right", "left")
"""Run-time integers that are not compiled in."""
BIAS_INTEGERS = (
    "slope_batch", "slope_head", "diagonal", "mask_batch", "mask_head", "mask_tile", "seed_lo", "seed_hi", "offset",
    "threshold",
)  # fmt: skip
"""And those of `Biases`."""


@gluon.jit
def tiles(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr, PANELS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Shared memory as kernels/hopper/forward/steps.py has it."""
    if PANELS == 1:
        return (gl.allocate_shared_memory(dtype, [COUNT, ROWS, W], LAYOUT),)
    else:
        first = gl.allocate_shared_memory(dtype, [COUNT, ROWS, 2 * W], LAYOUT)
        return first, gl.allocate_shared_memory(dtype, [COUNT, ROWS, W], LAYOUT)


@gluon.jit(do_not_specialize=["lse_rows", *SIZES, *BIAS_INTEGERS])
def flash_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, counter, cu_q, cu_k, sinks, slopes, slope_batch, slope_head, diagonal, unit,
    mask, mask_batch, mask_head, mask_tile, kept_share, seed_lo, seed_hi, offset, threshold, scale_log2, bend, lse_rows,
    seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right, left,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, QK_PANELS: gl.constexpr,
    V_PANELS: gl.constexpr, RAGGED: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    ALIGNED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, MASK: gl.constexpr, DROPOUT: gl.constexpr,
    LINES: gl.constexpr, SPLIT_RELEASE: gl.constexpr, ONE_RING: gl.constexpr, EARLY_P: gl.constexpr,
    KEEP_P: gl.constexpr, Q_REGISTERS: gl.constexpr, FREE_Q: gl.constexpr, SHARE_O: gl.constexpr,
    O_SLOTS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Descriptors of q, k, v and the output with blocks of 64 (q, output) or BLOCK_N rows (k, v) and a panel's columns;
    lse [batch, num_heads, lse_rows] or None; counter: two int32 zeros, and zeros again at the end. sinks: a logit for
    each of num_heads that joins the softmax of its rows, or None. scale_log2: the softmax scale times log2(e).

    Query i sees the keys i + left .. i + right (LEFT, RIGHT: where there are such bounds) that there are (RAGGED: the
    last block may reach beyond them). ALIGNED: in the one block that has to be masked every row sees a key. SOFTCAP:
    scores are tanh(bend * q k^T), and scale_log2 is the cap times log2(e). ALIBI: 1 where no query sees a key behind
    its place, 2 where one does. MASK: 1 boolean, 2 additive, with which scale_log2 is log2(e). What these and dropout
    take is in `Biases`. Q_REGISTERS: columns of the queries that a consumer has in registers; FREE_Q: with all of them
    there the next tile's may come. The output leaves where Q was (SHARE_O), through O_SLOTS places for panels of a
    consumer, or whole through memory of its own.

    With cu_q and cu_k int32 [batch + 1] the sequences are packed: [1, heads, tokens, head_dim], lse [num_heads,
    lse_rows], seqlen_q is the longest, and the bounds are of each sequence (LOWER_RIGHT: plus its seqlen_k - seqlen_q).
    """
    dtype: gl.constexpr = q_desc.dtype
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    QK_W: gl.constexpr = q_desc.block_type.shape[RANK - 1]
    V_W: gl.constexpr = v_desc.block_type.shape[RANK - 1]
    QK_L: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    V_L: gl.constexpr = gl.NVMMASharedLayout(v_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # [CONSUMERS, 64, head_dim]
    q_smem = tiles(dtype, CONSUMERS, 64, QK_W, QK_PANELS, QK_L)
    # [STAGES, BLOCK_N, head_dim]
    k_smem = tiles(dtype, STAGES, BLOCK_N, QK_W, QK_PANELS, QK_L)
    if ONE_RING:
        v_smem = k_smem
    else:
        v_smem = tiles(dtype, STAGES, BLOCK_N, V_W, V_PANELS, V_L)
    # [CONSUMERS, 64, head_dim_v]
    if SHARE_O:  # the output leaves where Q was
        o_smem = q_smem
    elif O_SLOTS > 0:  # [CONSUMERS * O_SLOTS, 64, 64]: panel by panel
        o_smem = tiles(dtype, CONSUMERS * O_SLOTS, 64, 64, 1, V_L)
    else:
        o_smem = tiles(dtype, CONSUMERS, 64, V_W, V_PANELS, V_L)
    places = None
    if LINES:  # [BLOCK_N, 16]
        places = places_of_keys(BLOCK_N)
    memory = Memory(
        q=q_smem,
        k=k_smem,
        v=v_smem,
        o=o_smem,
        q_full=new_barriers(CONSUMERS),
        q_empty=new_barriers(CONSUMERS),
        full=new_barriers(STAGES),
        k_empty=new_barriers(STAGES),
        v_empty=new_barriers(STAGES),
        ring=new_tile_ring(new_tile_numbers()),
        places=places,
    )
    for i in gl.static_range(CONSUMERS):
        open_slot(memory.q_full, memory.q_empty, i, 1)
    for i in gl.static_range(STAGES):
        open_slot(memory.full, memory.k_empty, i, CONSUMERS)
        mbarrier.init(memory.v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        open_slot(memory.ring.full, memory.ring.empty, i, CONSUMERS)
    fence_async_shared()
    sizes = Sizes(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        group_size=group_size,
        batch_heads=batch_heads,
        head_group=head_group,
        right=right,
        left=left,
    )
    biases = Biases(
        slopes=slopes,
        slope_batch=slope_batch,
        slope_head=slope_head,
        diagonal=diagonal,
        unit=unit,
        mask=mask,
        mask_batch=mask_batch,
        mask_head=mask_head,
        mask_tile=mask_tile,
        kept_share=kept_share,
        seed_lo=seed_lo,
        seed_hi=seed_hi,
        offset=offset,
        threshold=threshold,
    )
    OPTIONS: gl.constexpr = Options(
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        CONSUMERS=CONSUMERS,
        QK_PANELS=QK_PANELS,
        V_PANELS=V_PANELS,
        RAGGED=RAGGED,
        RIGHT=RIGHT,
        LEFT=LEFT,
        LOWER_RIGHT=LOWER_RIGHT,
        ALIGNED=ALIGNED,
        SOFTCAP=SOFTCAP,
        ALIBI=ALIBI,
        LINES=LINES,
        MASK=MASK,
        DROPOUT=DROPOUT,
        SPLIT_RELEASE=SPLIT_RELEASE,
        ONE_RING=ONE_RING,
        EARLY_P=EARLY_P,
        KEEP_P=KEEP_P,
        Q_REGISTERS=Q_REGISTERS,
        FREE_Q=FREE_Q,
        SHARE_O=SHARE_O,
        O_SLOTS=O_SLOTS,
    )
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 0, OPTIONS)),
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 1, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, cu_q, cu_k, diagonal, sizes, OPTIONS)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 0, OPTIONS)),
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 1, OPTIONS)),
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 2, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, cu_q, cu_k, diagonal, sizes, OPTIONS)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 0, OPTIONS)),
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 1, OPTIONS)),
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 2, OPTIONS)),
            (consumer, (o_desc, lse, sinks, memory, cu_q, cu_k, scale_log2, bend, biases, sizes, lse_rows, 3, OPTIONS)),
            (producer, (q_desc, k_desc, v_desc, memory, counter, cu_q, cu_k, diagonal, sizes, OPTIONS)),
        ], [4, 4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
