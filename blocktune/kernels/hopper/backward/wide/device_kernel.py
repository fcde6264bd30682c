"""The Hopper attention backward of wide heads as it is launched, in Gluon: memory, barriers, which warps do what.

The warps are in warps.py and, where 128 keys fit, in halves.py. Those that wait for turns in a fixed order are in
adders.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.backward.adders import adder
from blocktune.kernels.hopper.backward.arguments import Ends, Sizes, Steps, WideMemory
from blocktune.kernels.hopper.backward.device_kernel import BOUNDS, SIZES
from blocktune.kernels.hopper.backward.wide.halves import consumer_of_half
from blocktune.kernels.hopper.backward.wide.warps import wide_consumer, wide_producer
from blocktune.kernels.hopper.biases.of_keys import KEY_INTEGERS, KeyBiases
from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot


@gluon.jit(do_not_specialize=[*SIZES, *BOUNDS, *KEY_INTEGERS])
def flash_bwd_hopper_wide_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, scale, scale_log2,
    seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group, rows, upper, lower, cap_in, cu_q, cu_k,
    turns, slopes, slope_batch, slope_head, anchor, mask, mask_batch, mask_head, mask_tile, mask_column,
    seed_lo, seed_hi, offset, threshold,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """Arguments as of `flash_bwd_hopper_kernel`, but all blocks of tensors are panels of 64 rows and 64 columns, and
    the sums of dq have PANELS of them for every 64 queries. The form is general. Blocks of k and v with 128 rows ask
    for the warps of wide/halves.py."""
    PANELS: gl.constexpr = OPTIONS.PANELS
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    STAGES: gl.constexpr = OPTIONS.STAGES
    DO_STAGES: gl.constexpr = OPTIONS.DO_STAGES
    dtype: gl.constexpr = q_desc.dtype
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    BLOCK: gl.constexpr = q_desc.block_type.shape[RANK - 2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[RANK - 2]
    HALVES: gl.constexpr = BLOCK_N == 128  # each warpgroup owns half of the keys
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # [PANELS, BLOCK_N, 64]
    k_smem = gl.allocate_shared_memory(dtype, [PANELS, BLOCK_N, 64], TILE_L)
    # [V_PANELS, BLOCK_N, 64]
    v_smem = gl.allocate_shared_memory(dtype, [V_PANELS, BLOCK_N, 64], TILE_L)
    # [STAGES * PANELS, BLOCK_M, 64]
    q_smem = gl.allocate_shared_memory(dtype, [STAGES * PANELS, BLOCK, 64], TILE_L)
    # [DO_STAGES * V_PANELS, BLOCK_M, 64]
    do_smem = gl.allocate_shared_memory(dtype, [DO_STAGES * V_PANELS, BLOCK, 64], TILE_L)
    # [BLOCK_N, BLOCK_M], or of two steps [2, BLOCK_N, BLOCK_M]
    DS: gl.constexpr = [2, BLOCK_N, BLOCK] if HALVES else [BLOCK_N, BLOCK]
    ds_smem = gl.allocate_shared_memory(dtype, DS, TILE_L)
    P_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    p_smem = None if HALVES else gl.allocate_shared_memory(gl.float32, [64, 64], P_L)
    # [2, BLOCK_M, 64]
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK, 64], dq_desc.layout)
    # [STAGES, BLOCK_M]
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse_desc.layout)
    # [DO_STAGES, BLOCK_M]
    delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], delta_desc.layout)
    tile_numbers = new_tile_numbers()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = new_barriers(STAGES)
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
        q_empty=q_empty,
        do_full=new_barriers(DO_STAGES),
        do_empty=q_empty if HALVES else new_barriers(DO_STAGES),  # halves.py releases both together
        exchanged=new_barriers(2),
    )
    ends = Ends(kv_full=kv_full, kv_empty=kv_empty, ring=new_tile_ring(tile_numbers))
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        open_slot(memory.q_full, memory.q_empty, i, 2)
    for i in gl.static_range(DO_STAGES):
        mbarrier.init(memory.do_full.index(i), count=1)
        if not HALVES:
            mbarrier.init(memory.do_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(memory.exchanged.index(i), count=2 if HALVES else 1)
        open_slot(ends.ring.full, ends.ring.empty, i, 4 if OPTIONS.ORDERED else 2)
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
        dq_desc=dq_desc, dq_sums=None, memory=memory, scale_log2=scale_log2, cap_in=cap_in, biases=biases, head=None
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
    )
    if HALVES:
        gl.warp_specialize([
            (consumer_of_half, (steps, ends, sizes, dk_desc, dv_desc, scale, 0, OPTIONS)),
            (consumer_of_half, (steps, ends, sizes, dk_desc, dv_desc, scale, 1, OPTIONS)),
            (wide_producer, (
                q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, counter, ends, sizes, OPTIONS,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
    elif OPTIONS.ORDERED:
        gl.warp_specialize([
            (wide_consumer, (steps, ends, sizes, dv_desc, scale, 0, OPTIONS)),
            (wide_consumer, (steps, ends, sizes, dk_desc, scale, 1, OPTIONS)),
            (wide_producer, (
                q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, counter, ends, sizes, OPTIONS,
            )),
            (adder, (memory, dq_desc, ends.ring, sizes, turns, 0, True, OPTIONS)),
            (adder, (memory, dq_desc, ends.ring, sizes, turns, 1, True, OPTIONS)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (wide_consumer, (steps, ends, sizes, dv_desc, scale, 0, OPTIONS)),
            (wide_consumer, (steps, ends, sizes, dk_desc, scale, 1, OPTIONS)),
            (wide_producer, (
                q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, memory, counter, ends, sizes, OPTIONS,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
