"""The Hopper attention forward, in Gluon: the kernel that shares out memory, barriers and registers among its warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blocktune.kernels.hopper.common.slots import new_barriers, new_tile_numbers, new_tile_ring, open_slot
from blocktune.kernels.hopper.forward.arguments import Biases, Memory, Scaling, Sizes, Tensors
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
    """Allocate shared memory as kernels/hopper/forward/steps.py has it."""
    if PANELS == 1:
        return (gl.allocate_shared_memory(dtype, [COUNT, ROWS, W], LAYOUT),)
    else:
        first = gl.allocate_shared_memory(dtype, [COUNT, ROWS, 2 * W], LAYOUT)
        return first, gl.allocate_shared_memory(dtype, [COUNT, ROWS, W], LAYOUT)


@gluon.jit
def open_slots(memory, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Set up the barriers of all slots of a forward."""
    for i in gl.static_range(CONSUMERS):
        open_slot(memory.q_full, memory.q_empty, i, 1)
    for i in gl.static_range(STAGES):
        open_slot(memory.full, memory.k_empty, i, CONSUMERS)
        mbarrier.init(memory.v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        open_slot(memory.ring.full, memory.ring.empty, i, CONSUMERS)
    fence_async_shared()


CACHE_INTEGERS = ("k_rows", "v_rows", "table_line")
"""And those of a cache."""


@gluon.jit(do_not_specialize=["lse_rows", *CACHE_INTEGERS, *SIZES, *BIAS_INTEGERS])
def flash_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, counter, cu_q, cu_k, sinks, slopes, slope_batch, slope_head, diagonal, unit,
    mask, mask_batch, mask_head, mask_tile, kept_share, seed_lo, seed_hi, offset, threshold, scale_log2, bend, lse_rows,
    lengths, table, k_rows, v_rows, table_line, seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group,
    right, left, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Compute attention: the arguments of `Tensors`, `Biases`, `Scaling` and `Sizes`, and the constants `Options`
    (kernels/hopper/forward/arguments.py), flat, since Triton compiles integers inside a tuple in where they are 1.

    Descriptors of q, k, v and the output have blocks of 64 (q, output) or BLOCK_N rows (k, v) and a panel's columns;
    lse [batch, num_heads, lse_rows] or None; sinks: a logit for each of num_heads that joins the softmax of its rows,
    or None. With cu_q and cu_k the sequences are packed: [1, heads, tokens, head_dim], lse [num_heads, lse_rows],
    seqlen_q is the longest, and the bounds are of each sequence. With `lengths` the keys are those of a cache, with
    `table` in pages, and blocks of k and v have the rows and columns of `page_block`.
    """
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    STAGES: gl.constexpr = OPTIONS.STAGES
    dtype: gl.constexpr = q_desc.dtype
    RANK: gl.constexpr = len(q_desc.block_type.shape)
    QK_W: gl.constexpr = q_desc.block_type.shape[RANK - 1]
    V_W: gl.constexpr = OPTIONS.V_WIDTH
    QK_L: gl.constexpr = gl.NVMMASharedLayout(q_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    V_L: gl.constexpr = gl.NVMMASharedLayout(v_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2)
    # [CONSUMERS, 64, head_dim]
    q_smem = tiles(dtype, CONSUMERS, 64, QK_W, OPTIONS.QK_PANELS, QK_L)
    # [STAGES, BLOCK_N, head_dim]
    k_smem = tiles(dtype, STAGES, BLOCK_N, QK_W, OPTIONS.QK_PANELS, QK_L)
    if OPTIONS.ONE_RING:
        v_smem = k_smem
    else:
        v_smem = tiles(dtype, STAGES, BLOCK_N, V_W, OPTIONS.V_PANELS, V_L)
    # [CONSUMERS, 64, head_dim_v]
    if OPTIONS.SHARE_O:  # the output leaves where Q was
        o_smem = q_smem
    elif OPTIONS.O_SLOTS > 0:  # [CONSUMERS * O_SLOTS, 64, 64]: panel by panel
        o_smem = tiles(dtype, CONSUMERS * OPTIONS.O_SLOTS, 64, 64, 1, V_L)
    else:
        o_smem = tiles(dtype, CONSUMERS, 64, V_W, OPTIONS.V_PANELS, V_L)
    places = None
    if OPTIONS.LINES:  # [BLOCK_N, 16]
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
    open_slots(memory, CONSUMERS, STAGES)
    tensors = Tensors(q_desc, k_desc, v_desc, o_desc, lse, counter, cu_q, cu_k, sinks, lengths, table)
    scaling = Scaling(scale_log2, bend)
    sizes = Sizes(
        seqlen_q, seqlen_k, num_heads, group_size, batch_heads, head_group, right, left, lse_rows, k_rows, v_rows,
        table_line,
    )  # fmt: skip
    biases = Biases(
        slopes, slope_batch, slope_head, diagonal, unit, mask, mask_batch, mask_head, mask_tile, kept_share, seed_lo,
        seed_hi, offset, threshold,
    )  # fmt: skip
    CONSUMER_REGS: gl.constexpr = OPTIONS.CONSUMER_REGS
    PRODUCER_REGS: gl.constexpr = OPTIONS.PRODUCER_REGS
    gl.static_assert(CONSUMERS >= 2 and CONSUMERS <= 4)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (producer, (tensors, memory, diagonal, sizes, OPTIONS)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 2, OPTIONS)),
            (producer, (tensors, memory, diagonal, sizes, OPTIONS)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (tensors, memory, scaling, biases, sizes, 0, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 1, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 2, OPTIONS)),
            (consumer, (tensors, memory, scaling, biases, sizes, 3, OPTIONS)),
            (producer, (tensors, memory, diagonal, sizes, OPTIONS)),
        ], [4, 4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
