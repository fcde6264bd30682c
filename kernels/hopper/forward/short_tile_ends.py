"""Where one tile of the Hopper forward for short sequences ends and the next one begins, in Gluon: what it is, the
softmax of its first block, and the way of its output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocktune.kernels.hopper.common.device_functions import as_block, copy_out, locate, thread_sum
from blocktune.kernels.hopper.forward.steps import first_maximum, hide, key_range, row_bounds
from blocktune.kernels.hopper.forward.warps import divided


@gluon.jit
def located(
    tile, sizes, C: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """What consumer C does of a tile, or of the last one if there is no such tile: (batch, head, first row), and the
    last block of keys that the tile's rows see and that these rows see."""
    q_tiles, num_heads, batch_heads, head_group, seqlen_q, seqlen_k, right = sizes
    ROWS: gl.constexpr = 64
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    tile = gl.minimum(tile, q_tiles * batch_heads - 1)
    m, batch_head = locate(tile, q_tiles, head_group, batch_heads, RIGHT)
    row = m * BLOCK_M + C * ROWS
    _, last = key_range(m * BLOCK_M, seqlen_q, seqlen_k, right, 0, BLOCK_M, BLOCK_N, RIGHT, False)
    _, own_last = key_range(row, seqlen_q, seqlen_k, right, 0, ROWS, BLOCK_N, RIGHT, False)
    return (batch_head // num_heads, batch_head % num_heads, row), (last, own_last)


@gluon.jit
def first_softmax(
    qk, row, own_last, seqlen_k, right, scale, ALIGNED: gl.constexpr, RAGGED: gl.constexpr, RIGHT: gl.constexpr,
    EARLY_P: gl.constexpr, S_L: gl.constexpr, P_L: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Of the first block: probabilities, running maximum and sums; and what masks the other blocks."""
    ROWS: gl.constexpr = qk.shape[0]
    BLOCK_N: gl.constexpr = qk.shape[1]
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    last_seen, _ = row_bounds(row, seqlen_k, right, 0, ROWS, RAGGED, RIGHT, False, ROW_S)
    qk = hide(qk, last_seen, None, own_last * BLOCK_N, RAGGED or RIGHT, False, S_L)
    maximum = first_maximum(qk, scale, ROW_S)
    p = gl.exp2(qk * scale - maximum[:, None])
    sums = thread_sum(p)
    if EARLY_P:
        p = gl.convert_layout(p.to(dtype), P_L)
    highest = seqlen_k - BLOCK_N  # blocks of keys up to this one are wholly visible
    if RIGHT:
        highest = gl.minimum(seqlen_k, row + right + 1) - BLOCK_N
    return p, maximum, sums, (last_seen, highest)


@gluon.jit
def send(
    acc, sums, maximum, rows, output, C: gl.constexpr, O_SLOTS: gl.constexpr, ALIGNED: gl.constexpr,
    ROW_S: gl.constexpr, O_L: gl.constexpr,
):  # fmt: skip
    """Sends the accumulators over the sums of their rows on their way, panel by panel, and writes the log-sum-exp.

    output: descriptor, log-sum-exp and its rows a head, heads, queries, and memory: O_SLOTS panels a consumer.
    """
    LN_2: gl.constexpr = 0.6931471805599453
    o_desc, lse, lse_rows, num_heads, seqlen_q, memory = output
    batch, head, row = rows
    ROWS: gl.constexpr = acc[0].shape[0]
    W: gl.constexpr = o_desc.block_type.shape[3]
    COUNT: gl.constexpr = acc[0].shape[1] // W
    if row < seqlen_q:
        total = gl.convert_layout(gl.sum(sums, 1), ROW_S)
        parts = columns(divided(acc[0], total, ALIGNED, O_L).to(o_desc.dtype), W)
        for part in gl.static_range(COUNT):
            panel = memory.index(C * O_SLOTS + part % O_SLOTS)
            tma.store_wait(O_SLOTS - 1)  # what was there has left
            panel.store(parts[part])
            fence_async_shared()
            copy_out(o_desc, [batch, head, row, part * W], as_block(o_desc, panel))
        if lse is not None:
            start = (batch * num_heads + head).to(gl.int64) * lse_rows
            each = row + gl.arange(0, ROWS, ROW_S)
            gl.store(lse + start + each, (maximum + gl.log2(total)) * LN_2, mask=each < seqlen_q)


@gluon.jit
def columns(x, W: gl.constexpr):
    """The columns of x, W by W, in the registers where they are."""
    if x.shape[1] == W:
        return (x,)
    elif x.shape[1] == 2 * W:
        left, right = halves(x)
        return left, right
    else:
        left, right = halves(x)
        first, second = halves(left)
        third, fourth = halves(right)
        return first, second, third, fourth


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
