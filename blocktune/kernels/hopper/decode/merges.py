"""The merges of decoding on Hopper, in Gluon: of a block's warps, and of the shares of a key head's keys.

The warps' results meet in shared memory. With SPLITS > 1 the block writes what it has to the workspace, and the last of
a tile's blocks, which a counter finds, merges the shares: there is no second launch.

The workspace is float32: o [splits, total_rows, WIDTH], then m [total_rows, splits], then l likewise, with
total_rows = batch * num_heads * seqlen_q. m is a maximum in base 2, l = sum 2^(s - m), o = sum 2^(s - m) v.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.sinks import log2_with_sink, sum_with_sink
from blocktune.kernels.hopper.decode.arguments import Found
from blocktune.kernels.hopper.decode.tiles import finite

# Triton 3.7 renamed the barrier of a block.
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def result_layout(warps, rows):
    """Return the layout of results [parts, rows, dim], so that a thread has all parts of an element."""
    beside = min(warps, rows)
    return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, beside, warps // beside], [2, 1, 0])


@gluon.jit
def merge_warps(acc, maximum, sums, OUT: gl.constexpr):
    """Merge what the warps of a block have: acc [W, rows, WIDTH], maxima and sums [W, rows]."""
    W: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    WIDTH: gl.constexpr = acc.shape[2]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    outputs = gl.allocate_shared_memory(gl.float32, [W, ROWS, WIDTH], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    maxima = gl.allocate_shared_memory(gl.float32, [W, ROWS], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [W, ROWS], FLAT)
    outputs.store(acc)
    maxima.store(maximum)
    totals.store(sums)
    # [W, rows]
    m = maxima.load(gl.SliceLayout(2, OUT))
    # [rows]
    best = gl.max(m, 0)
    # [W, rows]
    weights = gl.exp2(m - finite(best)[None, :])
    return Found(
        o=gl.sum(outputs.load(OUT) * weights[:, :, None], 0),
        m=best,
        l=gl.sum(totals.load(gl.SliceLayout(2, OUT)) * weights, 0),
    )


@gluon.jit
def store_part(work, found, rows, total_rows, WIDTH: gl.constexpr, SPLITS: gl.constexpr):
    """Store what this block found at its rows of its share in the workspace."""
    ROWS: gl.constexpr = found.o.shape[0]
    LAYOUT: gl.constexpr = found.o.type.layout
    start = gl.program_id(1) * total_rows + rows.place
    statistics = work + SPLITS * total_rows * WIDTH + rows.place * SPLITS + gl.program_id(1)
    own = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    # [ROWS, WIDTH]
    inside = (own < rows.count)[:, None] & (columns >= 0)[None, :]
    gl.store(work + start * WIDTH + own[:, None] * WIDTH + columns[None, :], found.o, mask=inside)
    # [ROWS]
    once = gl.arange(0, ROWS, found.m.type.layout)
    gl.store(statistics + once * SPLITS, found.m, mask=once < rows.count)
    gl.store(statistics + SPLITS * total_rows + once * SPLITS, found.l, mask=once < rows.count)


@gluon.constexpr_function
def shares_at_once(splits, elements_per_thread):
    """Return how many shares the merge loads together: all if 128 registers hold them, else what 64 hold, since the
    loop over the others takes some, too."""
    if splits * elements_per_thread <= 128:
        return splits
    return max(1, 64 // elements_per_thread)


@gluon.constexpr_function
def statistics_layout(shares, rows, warps):
    """Return the layout of [shares, rows]: a thread has all shares of a row, side by side, as it has all parts in
    `result_layout`."""
    beside = min(warps, rows)
    registers = [[1 << bit, 0] for bit in range(shares.bit_length() - 1)]
    registers += [[0, 1 << bit] for bit in range(beside.bit_length() - 1, rows.bit_length() - 1)]
    own = [[0, 1 << bit] for bit in range(beside.bit_length() - 1)]
    copies = [[0, 0]] * ((warps // beside).bit_length() - 1)
    return gl.DistributedLinearLayout(registers, [[0, 0]] * 5, own + copies, [], [shares, rows])


@gluon.jit
def merge_parts(
    work, rows, total_rows, ROWS: gl.constexpr, WIDTH: gl.constexpr, SPLITS: gl.constexpr, OUT: gl.constexpr
):
    """Merge what all shares have of the rows, past the first-level cache: others wrote them."""
    CHUNK: gl.constexpr = shares_at_once(SPLITS, ROWS * WIDTH // (32 * gl.num_warps()))
    PAIRS: gl.constexpr = gl.SliceLayout(2, OUT)
    SIDE_BY_SIDE: gl.constexpr = statistics_layout(CHUNK, ROWS, gl.num_warps())
    LAYOUT: gl.constexpr = gl.SliceLayout(0, OUT)
    own = gl.arange(0, ROWS, gl.SliceLayout(0, SIDE_BY_SIDE))
    shares = gl.arange(0, CHUNK, gl.SliceLayout(1, SIDE_BY_SIDE))
    # [CHUNK, ROWS]: statistics of CHUNK shares
    known = (own < rows.count)[None, :] & (shares >= 0)[:, None]
    maxima = work + SPLITS * total_rows * WIDTH + rows.place * SPLITS + (own[None, :] * SPLITS + shares[:, None])
    own = gl.arange(0, ROWS, gl.SliceLayout(0, PAIRS))
    shares = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    # [CHUNK, ROWS], and of outputs [CHUNK, ROWS, WIDTH]
    inside = (own < rows.count)[None, :] & (shares >= 0)[:, None]
    parts = work + rows.place * WIDTH + (shares[:, None] * (total_rows * WIDTH) + own[None, :] * WIDTH)[:, :, None]
    parts = parts + columns[None, None, :]
    # [ROWS], [ROWS], [ROWS, WIDTH]
    best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, PAIRS))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, PAIRS))
    o = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    for _ in range(SPLITS // CHUNK):
        # [CHUNK, ROWS], [CHUNK, ROWS], [CHUNK, ROWS, WIDTH]
        m = gl.load(maxima, mask=known, other=float("-inf"), cache_modifier=".cg")
        l = gl.load(maxima + SPLITS * total_rows, mask=known, other=0.0, cache_modifier=".cg")
        found = gl.load(parts, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        m = gl.convert_layout(m, PAIRS)
        # [ROWS]
        new = gl.maximum(best, gl.max(m, 0))
        # [CHUNK, ROWS]
        weights = gl.exp2(m - finite(new)[None, :])
        # [ROWS]
        kept = gl.exp2(best - finite(new))
        total = total * kept + gl.sum(gl.convert_layout(l, PAIRS) * weights, 0)
        o = o * gl.convert_layout(kept, gl.SliceLayout(1, LAYOUT))[:, None] + gl.sum(found * weights[:, :, None], 0)
        best = new
        maxima += CHUNK
        parts += CHUNK * total_rows * WIDTH
    return Found(o=o, m=best, l=total)


@gluon.jit
def store_result(output, found, rows, DIM: gl.constexpr):
    """Store the finished rows, DIM columns of them, divided by their sums; zeros and -inf where a row saw no key."""
    LN_2: gl.constexpr = 0.6931471805599453
    ROWS: gl.constexpr = found.o.shape[0]
    WIDTH: gl.constexpr = found.o.shape[1]
    LAYOUT: gl.constexpr = found.o.type.layout
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    m, l = found.m, found.l
    # [ROWS], [WIDTH]
    own = gl.arange(0, ROWS, PER_ROW)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if output.sinks is not None:
        l = sum_with_sink(l, m, output.sinks)
    # [ROWS]
    total = gl.where(l == 0.0, 1.0, l)
    head, query = own // rows.seqlen_q, own % rows.seqlen_q
    offsets = head.to(gl.int64) * output.strides.head + query.to(gl.int64) * output.strides.row
    # [ROWS, WIDTH]
    result = found.o / gl.convert_layout(total, PER_ROW)[:, None]
    inside = (own < rows.count)[:, None] & ((columns >= 0) if DIM == WIDTH else (columns < DIM))[None, :]
    pointers = output.out + offsets[:, None] + columns[None, :]
    gl.store(pointers, result.to(output.out.dtype.element_ty), mask=inside)
    if output.lse is not None:
        once = gl.arange(0, ROWS, l.type.layout)
        if output.sinks is None:
            lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(total)) * LN_2)
        else:
            lse = log2_with_sink(m + gl.log2(total), l, output.sinks) * LN_2
        gl.store(output.lse + rows.place + once, lse, mask=once < rows.count)


@gluon.jit
def finish_share(
    work, counter, output, found, rows, total_rows, DIM: gl.constexpr, SPLITS: gl.constexpr, OUT: gl.constexpr
):
    """Store what this block found: DIM columns of the result, or its share, which the last of the tile's blocks merges
    with those of all others."""
    ROWS: gl.constexpr = found.o.shape[0]
    WIDTH: gl.constexpr = found.o.shape[1]
    finished = SPLITS == 1
    if SPLITS > 1:
        store_part(work, found, rows, total_rows, WIDTH, SPLITS)
        block_barrier()  # all of this block is written before the counter says so
        counter += gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        finished = gl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if finished:
        if SPLITS > 1:
            gl.store(counter, 0)
            found = merge_parts(work, rows, total_rows, ROWS, WIDTH, SPLITS, OUT)
        store_result(output, found, rows, DIM)
