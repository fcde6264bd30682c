"""The Hopper attention backward as it is launched, in Gluon: shared memory, barriers, and which warps do what.

The warps are in warps.py, and those that add dq in adders.py. Heads wider than 128 have wide/device_kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.backward.adders import adder
from blocktune.kernels.hopper.backward.arguments import Ends, Memory, Sizes, Steps
from blocktune.kernels.hopper.backward.warps import consumer, producer
from blocktune.kernels.hopper.biases.of_keys import KEY_INTEGERS, KeyBiases
from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot

SIZES = ("seqlen_q", "seqlen_k", "num_heads_kv", "group_size", "batch_heads", "head_group")
"""Run-time integers that are not compiled in."""
BOUNDS = ("rows", "upper", "lower")
"""More of them, None in the plain form: rows of a head (packed) or of a head and batch entry in the workspace, and
between which keys a query i sees: i + lower and i + upper."""
LIST_STRIDES = ("stride_lb", "stride_lh", "stride_ln")
"""More again, None but under a block mask: the strides of its lists."""


@gluon.jit
def open_dq(memory, ADDERS: gl.constexpr):
    """Sets up the barriers of dQ that other warps add, where they do."""
    PLACES: gl.constexpr = memory.dq.shape[0]
    if ADDERS:
        for i in gl.static_range(4):
            mbarrier.init(memory.dq_full.index(i), count=1)
        for i in gl.static_range(PLACES):
            mbarrier.init(memory.dq_empty.index(i), count=1)


@gluon.jit(do_not_specialize=[*SIZES, *BOUNDS, *LIST_STRIDES, *KEY_INTEGERS])
def flash_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, dq_sums,
    scale, scale_log2,
    seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group, rows, upper, lower, cap_in, cu_q, cu_k,
    turns, lists, stride_lb, stride_lh, stride_ln,
    slopes, slope_batch, slope_head, anchor, mask, mask_batch, mask_head, mask_tile, mask_column,
    seed_lo, seed_hi, offset, threshold,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """Descriptors of q, dout (blocks of 64 rows), k, v (128), dk and dv (64), of the float32 sums of dq in register
    order, and of lse (base 2) and delta [batch, num_heads, seqlen_q]; counter: an int32 zero. scale_log2: the softmax
    scale times log2(e). batch_heads: batch * num_heads_kv.

    What the plain form has no use for is None: the integers of BOUNDS, cu_q and cu_k (where packed sequences begin),
    turns (int32 zeros, one for every 64 rows of the workspace), and with a soft cap cap_in = scale / softcap, when
    scale_log2 is softcap times log2(e). lists and their strides (by batch entry, query head and tile of keys) name the
    blocks of queries under a block mask (kernels/hopper/sparse/lists.py).
    slopes .. threshold: `KeyBiases`, all None without.

    Above 1 of OPTIONS.PARTS num_heads_kv, group_size, batch_heads and head_group are those of parts, and dk_desc and
    dv_desc describe float32 rows as dq_desc does; `join_parts_kernel` adds them up.
    """
    STAGES: gl.constexpr = OPTIONS.STAGES
    dtype: gl.constexpr = q_desc.dtype
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[RANK - 2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[RANK - 2]
    D: gl.constexpr = q_desc.block_type.shape[RANK - 1]
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # a half of the queries of dS is a whole panel of the swizzle
    DS_L: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=64 if OPTIONS.DEFER else 128, element_bitwidth=16, rank=2
    )
    # [BLOCK_N, head_dim]
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    # [STAGES, BLOCK_M, head_dim]
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    # [2, BLOCK_N, BLOCK_M]
    ds_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], DS_L)
    # [2 * DQ_SLOTS, a part of BLOCK_M * head_dim]
    DQ: gl.constexpr = [2 * OPTIONS.DQ_SLOTS] + dq_desc.block_type.shape  # noqa: RUF005
    dq_smem = gl.allocate_shared_memory(gl.float32, DQ, dq_desc.layout)
    # [STAGES, BLOCK_M]
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    tile_numbers = new_tile_numbers()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    memory = Memory(
        k=k_smem,
        v=v_smem,
        q=q_smem,
        do=do_smem,
        lse=lse_smem,
        delta=delta_smem,
        ds=ds_smem,
        dq=dq_smem,
        q_full=new_barriers(STAGES),
        do_full=new_barriers(STAGES),
        empty=new_barriers(STAGES),
        ds_full=new_barriers(2),
        dq_full=new_barriers(4) if OPTIONS.ADDERS else None,
        dq_empty=new_barriers(2 * OPTIONS.DQ_SLOTS) if OPTIONS.ADDERS else None,
    )
    ends = Ends(kv_full=kv_full, kv_empty=kv_empty, ring=new_tile_ring(tile_numbers))
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.q_full.index(i), count=1)
        open_slot(memory.do_full, memory.empty, i, 2)
    for i in gl.static_range(2):
        mbarrier.init(memory.ds_full.index(i), count=2)
        open_slot(ends.ring.full, ends.ring.empty, i, 4 if OPTIONS.ADDERS else 2)
    open_dq(memory, OPTIONS.ADDERS)
    fence_async_shared()
    biases = KeyBiases(
        slopes=slopes,
        slope_batch=slope_batch,
        slope_head=slope_head,
        anchor=anchor,
        mask=mask,
        mask_batch=mask_batch,
        mask_head=mask_head,
        mask_tile=mask_tile,
        mask_column=mask_column,
        seed_lo=seed_lo,
        seed_hi=seed_hi,
        offset=offset,
        threshold=threshold,
    )
    steps = Steps(
        dq_desc=dq_desc, dq_sums=dq_sums, memory=memory, scale_log2=scale_log2, cap_in=cap_in, biases=biases, head=None
    )
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
        lists=lists,
        stride_lb=stride_lb,
        stride_lh=stride_lh,
        stride_ln=stride_ln,
    )
    if OPTIONS.ADDERS:
        gl.warp_specialize([
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 0, OPTIONS)),
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 1, OPTIONS)),
            (
                producer,
                (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, ends, counter, sizes, biases, OPTIONS),
            ),
            (adder, (memory, dq_desc, ends.ring, sizes, turns, 0, False, OPTIONS)),
            (adder, (memory, dq_desc, ends.ring, sizes, turns, 1, False, OPTIONS)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 0, OPTIONS)),
            (consumer, (steps, dk_desc, dv_desc, ends, scale, sizes, 1, OPTIONS)),
            (
                producer,
                (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, ends, counter, sizes, biases, OPTIONS),
            ),
        ], [4, 1], [240, 24])  # fmt: skip
