"""The 8-bit Hopper forward, in Gluon: the kernel that shares out memory, barriers and registers among its warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot
from blocktune.kernels.hopper.forward.arguments import Sizes
from blocktune.kernels.hopper.forward.device_kernel import tiles
from blocktune.kernels.hopper.fp8.arguments import Memory, Scales, Tensors
from blocktune.kernels.hopper.fp8.row_sums import shares_of
from blocktune.kernels.hopper.fp8.sums import has_float32_sums
from blocktune.kernels.hopper.fp8.turn_values import TURNERS, turner, values
from blocktune.kernels.hopper.fp8.warps import consumer, producer

SIZES = ("seqlen_q", "seqlen_k", "num_heads", "group_size", "batch_heads", "head_group", "right")
SCALES = ("scale_q", "scale_k", "scale_v")
STRIDES = ("scale_qb", "scale_qh", "scale_kb", "scale_kh", "scale_vb", "scale_vh")


@gluon.jit(do_not_specialize=[*STRIDES, *SIZES])
def flash_fwd_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, counter, scale_log2, scale_q, scale_k, scale_v,
    scale_qb, scale_qh, scale_kb, scale_kh, scale_vb, scale_vh,
    seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Compute attention: the arguments of `Tensors`, `Scales` and `Sizes`, and the constants `Options`
    (kernels/hopper/fp8/arguments.py), flat, since Triton compiles integers inside a tuple in where they are 1.

    Descriptors of q and k (e4m3) and the output have blocks of 64 (q, output) or BLOCK_N rows (k), of the values as
    kernels/hopper/fp8/transpose_values.py writes them blocks [width, BLOCK_N]; lse [batch, num_heads, seqlen_q] or
    None. scale_log2: the softmax scale times log2(e). scale_q, scale_k, scale_v: what the numbers of a head are
    multiplied with, float32 with strides of (batch, head), or None for 1.
    """
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    STAGES: gl.constexpr = OPTIONS.STAGES
    dtype: gl.constexpr = q_desc.dtype
    QK_W: gl.constexpr = q_desc.block_type.shape[3]
    V_W: gl.constexpr = o_desc.block_type.shape[3]
    QK_L: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, element_bitwidth=8, rank=2)
    V_L: gl.constexpr = gl.NVMMASharedLayout(v_desc.layout.swizzle_byte_width, element_bitwidth=8, rank=2)
    O_L: gl.constexpr = gl.NVMMASharedLayout(o_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # [CONSUMERS, 64, head_dim]
    q_smem = tiles(dtype, CONSUMERS, 64, QK_W, 1, QK_L)
    # [STAGES, BLOCK_N, head_dim]
    k_smem = tiles(dtype, STAGES, BLOCK_N, QK_W, 1, QK_L)
    # [STAGES, head_dim_v, BLOCK_N]
    v_smem = values(dtype, STAGES, V_W, BLOCK_N, V_L, OPTIONS.TURNS)
    # [CONSUMERS, 64, head_dim_v] of the output, or 64 rows of float32 sums and then the output
    o_smem = tiles(o_desc.dtype, CONSUMERS, 128 if has_float32_sums(CONSUMERS, V_W) else 64, V_W, 1, O_L)
    # [SHARES_COLUMNS, BLOCK_N]
    shares = shares_of(dtype, BLOCK_N) if lse is None else None
    memory = Memory(
        q=q_smem,
        k=k_smem,
        v=v_smem,
        o=o_smem,
        q_full=new_barriers(CONSUMERS),
        q_empty=new_barriers(CONSUMERS),
        full=new_barriers(STAGES),
        raw_full=new_barriers(STAGES) if OPTIONS.TURNS else None,
        ring=new_tile_ring(new_tile_numbers()),
        shares=shares,
    )
    for i in gl.static_range(CONSUMERS):
        open_slot(memory.q_full, memory.q_empty, i, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.full.index(i), count=2 if OPTIONS.TURNS else 1)
        if OPTIONS.TURNS:
            mbarrier.init(memory.raw_full.index(i), count=1)
    for i in gl.static_range(2):
        open_slot(memory.ring.full, memory.ring.empty, i, CONSUMERS + 1 if OPTIONS.TURNS else CONSUMERS)
    fence_async_shared()
    tensors = Tensors(q_desc, k_desc, v_desc, o_desc, lse, counter)
    scales = Scales(
        scale_log2, scale_q, scale_k, scale_v, scale_qb, scale_qh, scale_kb, scale_kh, scale_vb, scale_vh
    )  # fmt: skip
    sizes = Sizes(seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right, 0)
    C_REGS: gl.constexpr = OPTIONS.CONSUMER_REGS
    P_REGS: gl.constexpr = OPTIONS.PRODUCER_REGS
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (tensors, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scales, sizes, 1, OPTIONS)),
            (turner, (memory, sizes, OPTIONS)),
            (producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, TURNERS, 1], [C_REGS, P_REGS, P_REGS])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (tensors, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scales, sizes, 1, OPTIONS)),
            (consumer, (tensors, memory, scales, sizes, 2, OPTIONS)),
            (turner, (memory, sizes, OPTIONS)),
            (producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, 4, TURNERS, 1], [C_REGS, C_REGS, P_REGS, P_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (tensors, memory, scales, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scales, sizes, 1, OPTIONS)),
            (consumer, (tensors, memory, scales, sizes, 2, OPTIONS)),
            (consumer, (tensors, memory, scales, sizes, 3, OPTIONS)),
            (turner, (memory, sizes, OPTIONS)),
            (producer, (tensors, memory, sizes, OPTIONS)),
        ], [4, 4, 4, TURNERS, 1], [C_REGS, C_REGS, C_REGS, P_REGS, P_REGS])  # fmt: skip
