"""The Hopper attention backward of wide heads as it is launched, in Gluon: memory, barriers, which warps do what.

The warps are in warps.py and, where 128 keys fit, in halves.py. Those that wait for turns in a fixed order are in
adders.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.backward.adders import adder
from blocktune.kernels.hopper.backward.arguments import Memory, Scaling, Sizes, Tensors
from blocktune.kernels.hopper.backward.device_kernel import OTHER_SIZES, SIZES
from blocktune.kernels.hopper.backward.wide.halves import consumer_of_half
from blocktune.kernels.hopper.backward.wide.warps import wide_consumer, wide_producer
from blocktune.kernels.hopper.biases.of_keys import KEY_INTEGERS, KeyBiases
from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot


@gluon.jit(do_not_specialize=[*SIZES, *OTHER_SIZES, *KEY_INTEGERS])
def flash_bwd_hopper_wide_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, dq_sums, scale,
    scale_log2, seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group, rows, right, left, cap_in, cu_q,
    cu_k, turns, lists, list_batch, list_head, list_tile, slopes, slope_batch, slope_head, anchor, mask, mask_batch,
    mask_head, mask_tile, mask_column, seed_lo, seed_hi, offset, threshold, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Do what `flash_bwd_hopper_kernel` does for heads wider than 128. All blocks of tensors are panels of 64 rows and
    64 columns, and the sums of dq have PANELS of them for every 64 queries. Keys of 128 rows have the warps of
    wide/halves.py. dq_sums, lists and their strides are None."""
    PANELS: gl.constexpr = OPTIONS.PANELS
    V_PANELS: gl.constexpr = OPTIONS.V_PANELS
    STAGES: gl.constexpr = OPTIONS.STAGES
    DO_STAGES: gl.constexpr = OPTIONS.DO_STAGES
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    HALVES: gl.constexpr = BLOCK_N == 128  # each warpgroup owns half of the keys
    dtype: gl.constexpr = q_desc.dtype
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # [PANELS, BLOCK_N, 64]
    k_smem = gl.allocate_shared_memory(dtype, [PANELS, BLOCK_N, 64], TILE_L)
    # [V_PANELS, BLOCK_N, 64]
    v_smem = gl.allocate_shared_memory(dtype, [V_PANELS, BLOCK_N, 64], TILE_L)
    # [STAGES * PANELS, BLOCK_M, 64]
    q_smem = gl.allocate_shared_memory(dtype, [STAGES * PANELS, BLOCK_M, 64], TILE_L)
    # [DO_STAGES * V_PANELS, BLOCK_M, 64]
    do_smem = gl.allocate_shared_memory(dtype, [DO_STAGES * V_PANELS, BLOCK_M, 64], TILE_L)
    # [BLOCK_N, BLOCK_M], or of two steps [2, BLOCK_N, BLOCK_M]
    DS: gl.constexpr = [2, BLOCK_N, BLOCK_M] if HALVES else [BLOCK_N, BLOCK_M]
    ds_smem = gl.allocate_shared_memory(dtype, DS, TILE_L)
    P_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    p_smem = None if HALVES else gl.allocate_shared_memory(gl.float32, [64, 64], P_L)
    # [2, BLOCK_M, 64]
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, 64], dq_desc.layout)
    # [STAGES, BLOCK_M]
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    # [DO_STAGES, BLOCK_M]
    delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], delta_desc.layout)
    tile_numbers = new_tile_numbers()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = new_barriers(STAGES)
    memory = Memory(
        k=k_smem,
        v=v_smem,
        q=q_smem,
        do=do_smem,
        lse=lse_smem,
        delta=delta_smem,
        p=p_smem,
        ds=ds_smem,
        dq=dq_smem,
        kv_full=kv_full,
        kv_empty=kv_empty,
        q_full=new_barriers(STAGES),
        q_empty=q_empty,
        do_full=new_barriers(DO_STAGES),
        do_empty=q_empty if HALVES else new_barriers(DO_STAGES),  # halves.py releases both together
        exchanged=new_barriers(2),
        dq_full=None,
        dq_empty=None,
        ring=new_tile_ring(tile_numbers),
    )
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
        open_slot(memory.ring.full, memory.ring.empty, i, 4 if OPTIONS.ORDERED else 2)
    fence_async_shared()
    tensors = Tensors(
        q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, dq_sums, cu_q, cu_k,
        turns, lists,
    )  # fmt: skip
    sizes = Sizes(
        seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group, rows, right, left, list_batch, list_head,
        list_tile,
    )  # fmt: skip
    scaling = Scaling(scale, scale_log2, cap_in)
    biases = KeyBiases(
        slopes, slope_batch, slope_head, anchor, mask, mask_batch, mask_head, mask_tile, mask_column, seed_lo, seed_hi,
        offset, threshold,
    )  # fmt: skip
    CONSUMER_REGS: gl.constexpr = OPTIONS.CONSUMER_REGS
    OTHER_REGS: gl.constexpr = OPTIONS.OTHER_REGS
    if HALVES:
        gl.warp_specialize([
            (consumer_of_half, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (consumer_of_half, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (wide_producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, 1], [CONSUMER_REGS, OTHER_REGS])  # fmt: skip
    elif OPTIONS.ORDERED:
        gl.warp_specialize([
            (wide_consumer, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (wide_consumer, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (wide_producer, (tensors, memory, sizes, OPTIONS)),
            (adder, (tensors, memory, sizes, 0, OPTIONS)),
            (adder, (tensors, memory, sizes, 1, OPTIONS)),
        ], [4, 1, 1, 1], [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, OTHER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (wide_consumer, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (wide_consumer, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (wide_producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, 1], [CONSUMER_REGS, OTHER_REGS])  # fmt: skip
