"""Where one tile of the Hopper forward for short sequences ends and the next one begins, in Gluon: what it is, the
softmax of its first block, and the way of its output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocktune.kernels.hopper.common.device_functions import as_block, copy_out, locate
from blocktune.kernels.hopper.common.sinks import sink_of
from blocktune.kernels.hopper.forward.bounds import hide, key_range, row_bounds
from blocktune.kernels.hopper.forward.output import columns, divided
from blocktune.kernels.hopper.forward.row_maxima import first_softmax, log_sum_exp, row_sums


@gluon.jit
def located(tile, q_tiles, sizes, C: gl.constexpr, OPTIONS: gl.constexpr):
    """What consumer C does of a tile, or of the last one if there is no such tile: (batch, head, first row), and the
    last block of keys that the tile's rows see and that these rows see."""
    ROWS: gl.constexpr = 64
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    seqlen_q, seqlen_k, right = sizes.seqlen_q, sizes.seqlen_k, sizes.right
    tile = gl.minimum(tile, q_tiles * sizes.batch_heads - 1)
    m, batch_head = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, RIGHT)
    row = m * BLOCK_M + C * ROWS
    _, last = key_range(m * BLOCK_M, seqlen_q, seqlen_k, right, 0, BLOCK_M, BLOCK_N, RIGHT, False)
    _, own_last = key_range(row, seqlen_q, seqlen_k, right, 0, ROWS, BLOCK_N, RIGHT, False)
    return (batch_head // sizes.num_heads, batch_head % sizes.num_heads, row), (last, own_last)


@gluon.jit
def first_block(
    qk, row, own_last, sizes, no_acc, scales, OPTIONS: gl.constexpr, S_L: gl.constexpr, P_L: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """What `first_softmax` gives of the first block, and what masks the other blocks."""
    ROWS: gl.constexpr = qk.shape[0]
    BLOCK_N: gl.constexpr = qk.shape[1]
    RAGGED: gl.constexpr = OPTIONS.RAGGED
    RIGHT: gl.constexpr = OPTIONS.RIGHT
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    # [64, BLOCK_N]
    last_seen, _ = row_bounds(row, sizes.seqlen_k, sizes.right, 0, ROWS, RAGGED, RIGHT, False, ROW_S)
    qk = hide(qk, last_seen, None, own_last * BLOCK_N, RAGGED or RIGHT, False, S_L)
    # [64, BLOCK_N], its sums [64, 4]
    p, top, factor, sums = first_softmax(qk, no_acc, scales, S_L)
    if OPTIONS.EARLY_P:
        p = gl.convert_layout(p.to(dtype), P_L)
    highest = sizes.seqlen_k - BLOCK_N  # blocks of keys up to this one are wholly visible
    if RIGHT:
        highest = gl.minimum(sizes.seqlen_k, row + sizes.right + 1) - BLOCK_N
    return p, top, factor, sums, (last_seen, highest)


@gluon.jit
def send(
    acc, sums, top, rows, scales, o_desc, lse, sinks, lse_rows, sizes, memory, C: gl.constexpr,
    OPTIONS: gl.constexpr, ROW_S: gl.constexpr, O_L: gl.constexpr,
):  # fmt: skip
    """Sends the accumulators over the sums of their rows on their way, panel by panel, and writes the log-sum-exp.

    rows: (batch, head, first row), as `located` gives them.
    """
    O_SLOTS: gl.constexpr = OPTIONS.O_SLOTS
    batch, head, row = rows
    ROWS: gl.constexpr = acc[0].shape[0]
    W: gl.constexpr = o_desc.block_type.shape[3]
    COUNT: gl.constexpr = acc[0].shape[1] // W
    if row < sizes.seqlen_q:
        sink = None
        if sinks is not None:
            sink = sink_of(sinks, head)
        # [64]
        total = row_sums(sums, top, sink, scales, ROW_S)
        # panels [64, W] of [64, head_dim_v]
        parts = columns(divided(acc[0], total, OPTIONS.ALIGNED, O_L).to(o_desc.dtype), W)
        for part in gl.static_range(COUNT):
            panel = memory.o.index(C * O_SLOTS + part % O_SLOTS)
            tma.store_wait(O_SLOTS - 1)  # what was there has left
            panel.store(parts[part])
            fence_async_shared()
            copy_out(o_desc, [batch, head, row, part * W], as_block(o_desc, panel))
        if lse is not None:
            start = (batch * sizes.num_heads + head).to(gl.int64) * lse_rows
            # [64]
            each = row + gl.arange(0, ROWS, ROW_S)
            gl.store(lse + start + each, log_sum_exp(top, total, sink, scales, ROW_S), mask=each < sizes.seqlen_q)
