"""The Hopper attention backward as it is launched, in Gluon: shared memory, barriers, and which warps do what.

The warps are in warps.py, and those that add dq in adders.py. Heads wider than 128 have wide/device_kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.backward.adders import adder
from blocktune.kernels.hopper.backward.arguments import Memory, Scaling, Sizes, Tensors
from blocktune.kernels.hopper.backward.warps import consumer, producer
from blocktune.kernels.hopper.biases.of_keys import KEY_INTEGERS, KeyBiases
from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot

SIZES = ("seqlen_q", "seqlen_k", "num_heads_kv", "group_size", "batch_heads", "head_group")
"""Run-time integers that are not compiled in."""
OTHER_SIZES = ("rows", "right", "left", "list_batch", "list_head", "list_tile")
"""More of them, None in the plain form, the strides of lists but under a block mask."""


@gluon.jit
def open_dq(memory, OPTIONS: gl.constexpr):
    """Set up the barriers of dQ that other warps add, where they do."""
    if OPTIONS.ADDERS:
        for i in gl.static_range(4):
            mbarrier.init(memory.dq_full.index(i), count=1)
        for i in gl.static_range(2 * OPTIONS.DQ_SLOTS):
            mbarrier.init(memory.dq_empty.index(i), count=1)


@gluon.jit(do_not_specialize=[*SIZES, *OTHER_SIZES, *KEY_INTEGERS])
def flash_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lse_desc, delta_desc, counter, dq_sums, scale,
    scale_log2, seqlen_q, seqlen_k, num_heads_kv, group_size, batch_heads, head_group, rows, right, left, cap_in, cu_q,
    cu_k, turns, lists, list_batch, list_head, list_tile, slopes, slope_batch, slope_head, anchor, mask, mask_batch,
    mask_head, mask_tile, mask_column, seed_lo, seed_hi, offset, threshold, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv, and add up dq: the arguments of `Tensors`, `Sizes`, `Scaling` and `KeyBiases`, and the
    constants `Options` (kernels/hopper/backward/arguments.py), flat, since Triton compiles integers inside a tuple in
    where they are 1.

    Descriptors of q, dout (blocks of 64 rows), k, v (128), dk and dv (64), of the float32 sums of dq in register
    order, and of lse and delta, rows of the workspace. With PARTS above 1 dk_desc and dv_desc describe float32 rows as
    dq_desc does; `join_parts_kernel` adds them up.
    """
    STAGES: gl.constexpr = OPTIONS.STAGES
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[len(q_desc.block_type.shape) - 1]
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    DS_WIDTH: gl.constexpr = 64 if OPTIONS.DEFER else 128  # a half of the queries of dS is a whole panel of the swizzle
    DS_L: gl.constexpr = gl.NVMMASharedLayout(DS_WIDTH, element_bitwidth=16, rank=2)
    # [BLOCK_N, head_dim]
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, D], TILE_L)
    # [STAGES, BLOCK_M, head_dim]
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], TILE_L)
    # [2, BLOCK_N, BLOCK_M]
    ds_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], DS_L)
    # [2 * DQ_SLOTS, a part of BLOCK_M * head_dim]
    PART: gl.constexpr = [64, 64] if OPTIONS.TAIL else dq_desc.block_type.shape
    DQ: gl.constexpr = [2 * OPTIONS.DQ_SLOTS] + PART  # noqa: RUF005
    dq_smem = gl.allocate_shared_memory(gl.float32, DQ, dq_desc.layout)
    # [STAGES, BLOCK_M]
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    tile_numbers = new_tile_numbers()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full, do_full, empty = new_barriers(STAGES), new_barriers(STAGES), new_barriers(STAGES)
    memory = Memory(
        k=k_smem,
        v=v_smem,
        q=q_smem,
        do=do_smem,
        lse=lse_smem,
        delta=delta_smem,
        p=None,
        ds=ds_smem,
        dq=dq_smem,
        kv_full=kv_full,
        kv_empty=kv_empty,
        q_full=q_full,
        q_empty=empty,
        do_full=do_full,
        do_empty=empty,
        exchanged=new_barriers(2),
        dq_full=new_barriers(4) if OPTIONS.ADDERS else None,
        dq_empty=new_barriers(2 * OPTIONS.DQ_SLOTS) if OPTIONS.ADDERS else None,
        ring=new_tile_ring(tile_numbers),
    )
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.q_full.index(i), count=1)
        open_slot(memory.do_full, memory.do_empty, i, 2)
    for i in gl.static_range(2):
        mbarrier.init(memory.exchanged.index(i), count=2)
        open_slot(memory.ring.full, memory.ring.empty, i, 4 if OPTIONS.ADDERS else 2)
    open_dq(memory, OPTIONS)
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
    if OPTIONS.ADDERS:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (producer, (tensors, memory, biases, sizes, OPTIONS)),
            (adder, (tensors, memory, sizes, 0, OPTIONS)),
            (adder, (tensors, memory, sizes, 1, OPTIONS)),
        ], [4, 1, 1, 1], [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, OTHER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (producer, (tensors, memory, biases, sizes, OPTIONS)),
        ], [4, 1], [CONSUMER_REGS, OTHER_REGS])  # fmt: skip
