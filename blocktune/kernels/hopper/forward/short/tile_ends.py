"""Where one tile of the Hopper forward for short sequences ends and the next one begins, in Gluon: what it is, the
softmax of its first block, and the way of its output.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.device_functions import locate
from blocktune.kernels.hopper.common.head_rows import HeadRows
from blocktune.kernels.hopper.common.sequences import hide, key_range, mask_bounds, row_bounds, whole_sequence
from blocktune.kernels.hopper.common.sinks import sink_of
from blocktune.kernels.hopper.forward.output import send_panels
from blocktune.kernels.hopper.forward.row_maxima import first_softmax, log_sum_exp, row_sums


class Place(NamedTuple):
    """What a consumer computes of a tile: its head, its first row, and the last block of keys that the tile's rows see
    and that these rows see."""

    batch: Any
    head: Any
    row: Any
    last: Any
    own_last: Any


@gluon.jit
def place_of(tile, q_tiles, sizes, C: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the place of consumer C in a tile, or in the last one if there is no such tile."""
    ROWS: gl.constexpr = 64
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.CONSUMERS
    sequence = whole_sequence(sizes)
    tile = gl.minimum(tile, q_tiles * sizes.batch_heads - 1)
    m, batch_head = locate(tile, q_tiles, sizes.head_group, sizes.batch_heads, OPTIONS.RIGHT)
    row = m * BLOCK_M + C * ROWS
    blocks = key_range(m * BLOCK_M, sequence, BLOCK_M, OPTIONS)
    own = key_range(row, sequence, ROWS, OPTIONS)
    batch = batch_head // sizes.num_heads
    return Place(batch=batch, head=batch_head % sizes.num_heads, row=row, last=blocks.last, own_last=own.last)


@gluon.jit
def first_block(qk, place, sizes, no_acc, scales, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr, dtype: gl.constexpr):
    """Compute the softmax of the first block. Return what `first_softmax` gives, and what masks the other blocks."""
    # [64, BLOCK_N]
    ROWS: gl.constexpr = qk.shape[0]
    sequence = whole_sequence(sizes)
    rows = row_bounds(place.row, sequence, ROWS, OPTIONS, LAYOUTS.rows)
    qk = hide(qk, rows, place.own_last * OPTIONS.BLOCK_N, OPTIONS, LAYOUTS.scores)
    # [64, BLOCK_N], its sums [64, 4]
    p, top, factor, sums = first_softmax(qk, no_acc, scales, LAYOUTS.scores)
    if OPTIONS.EARLY_P:
        p = gl.convert_layout(p.to(dtype), LAYOUTS.p)
    return (p, top, factor, sums), mask_bounds(rows, place.row, sequence, ROWS, OPTIONS)


@gluon.jit
def send(
    acc, state, place, scales, tensors, memory, sizes, C: gl.constexpr, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr
):
    """Send the accumulators over the sums of their rows on their way, panel by panel, and write the log-sum-exp."""
    ROWS: gl.constexpr = acc[0].shape[0]
    row = place.row
    if row < sizes.seqlen_q:
        sink = None
        if tensors.sinks is not None:
            sink = sink_of(tensors.sinks, place.head)
        # [64]
        total = row_sums(state.sums, state.top, sink, scales, LAYOUTS.rows)
        rows = HeadRows(tensors.o, place.batch, place.head, 0, sizes.seqlen_q)
        send_panels(acc[0], total, rows, row, memory.o, C, OPTIONS.O_SLOTS, OPTIONS.ALIGNED, LAYOUTS.out)
        if tensors.lse is not None:
            start = (place.batch * sizes.num_heads + place.head).to(gl.int64) * sizes.lse_rows
            # [64]
            each = row + gl.arange(0, ROWS, LAYOUTS.rows)
            lse = log_sum_exp(state.top, total, sink, scales, LAYOUTS.rows)
            gl.store(tensors.lse + start + each, lse, mask=each < sizes.seqlen_q)
