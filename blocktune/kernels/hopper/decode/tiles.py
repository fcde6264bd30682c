"""Decoding straight from memory to the tensor cores' registers, in Gluon: device functions, compute capability 9.0.

A block is one share of the keys of one (batch, key head) and up to 16 packed rows of queries (row r: query head
r // seqlen_q of the group, query r % seqlen_q). Every warp has keys of its own, with maximum, sum and output of its
own: nothing in the loop waits for another warp, and nothing goes through shared memory. The leading dimension of all
tensors here is the warp.

1. Loads of 16 bytes a thread put K and V where `mma` reads them. A product does not care for the order of the dimension
   that it sums over, hence the eight elements that a thread loads of a key may stand for any eight: Q is read in the
   same order. Of V a thread loads eight columns of two neighbouring keys, which the second product, V^T P^T, wants in
   one register; its rows come out permuted, and `in_order` puts them back. Both products have the packed rows as their
   columns, of which the smallest tile has eight.
2. The next tile of K is on its way while this tile's V is multiplied, and the next V from then on: the registers that a
   product has read are the buffer of what comes next. All registers of a multiprocessor together hold more than its
   shared memory.
3. STREAM: keys and values are marked as the first to leave the L2 cache. They are read once, and a line that comes in
   otherwise pushes out one that may have to be written to memory first.
4. The warps' results meet in shared memory. With SPLITS > 1 the block writes what it has to the workspace, and the last
   of a tile's blocks, which a counter finds, merges the shares: there is no second launch.

The workspace is float32: o [splits, total_rows, HEAD_DIM_V], then m [total_rows, splits], then l likewise, with
total_rows = batch * num_heads * seqlen_q. m is a maximum in base 2, l = sum 2^(s - m), o = sum 2^(s - m) v.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.sinks import log2_with_sink, sum_with_sink

# Triton 3.7 renamed the barrier of a block.
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


# ---- where everything is


@gluon.constexpr_function
def product_layout(warps):
    """Of both products' results: a matrix of 16 x 8 tiles for every warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def key_layout(warps):
    """Of the words of K [warps, keys, dim / 32, 4, 4]: operand A of a product that has eight elements a thread."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 8, 1, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 1, 2, 0])


@gluon.constexpr_function
def value_layout(warps):
    """Of the words of V [warps, keys, dim / 64, 8, 4]: operand A of a product with V^T, but for the order of rows."""
    return gl.BlockedLayout([1, 2, 1, 1, 4], [1, 4, 1, 8, 1], [warps, 1, 1, 1, 1], [4, 1, 3, 2, 0])


@gluon.constexpr_function
def result_layout(warps, rows):
    """Of results [parts, rows, dim], so that a thread has all parts of an element."""
    beside = min(warps, rows)
    return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, beside, warps // beside], [2, 1, 0])


@gluon.constexpr_function
def outer_layout(layout):
    """Of the first two dimensions of five."""
    return gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))


@gluon.constexpr_function
def inner_layout(layout, dim):
    """Of one of the last three dimensions of five."""
    for other in (4, 3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def key_range(tiles, SPLITS: gl.constexpr):
    """(first, stop) of this block's share of so many tiles."""
    split = gl.program_id(1)
    return tiles * split // SPLITS, tiles * (split + 1) // SPLITS


@gluon.jit
def tile_keys(tile, W: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, KEYS]: every warp's keys of a tile."""
    # [W], [KEYS]
    warps = gl.arange(0, W, gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    return tile * (W * KEYS) + warps[:, None] * KEYS + keys[None, :]


@gluon.jit
def read_keys(tile, stop_key, W: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """The keys that are read for those of a tile: instead of what lies behind the last key, which may be NaN that no
    probability of zero would undo, that key is read again."""
    return gl.maximum(gl.minimum(tile_keys(tile, W, KEYS, LAYOUT), stop_key - 1), 0)


@gluon.jit
def key_offsets(
    tile, stop_key, pages, stride_b, stride_n, PAGE_SIZE: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the keys of a tile begin, in words from the first of the entry, or of the cache if it has pages."""
    # [W, KEYS]
    keys = read_keys(tile, stop_key, W, KEYS, LAYOUT)
    if PAGE_SIZE == 0:
        return keys * stride_n
    elif PAGE_SIZE % KEYS == 0:
        return (pages.to(gl.int64) * stride_b)[:, None] + (keys % PAGE_SIZE) * stride_n
    else:
        return pages.to(gl.int64) * stride_b + (keys % PAGE_SIZE).to(gl.int64) * stride_n


@gluon.jit
def load_pages(
    table, tile, stop, stop_key, PAGE_SIZE: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr
):
    """The page of every key of a tile: [W] where the keys of a warp share one, else [W, KEYS]. Behind the share, where
    the table may hold anything, none is read."""
    if PAGE_SIZE == 0:
        return 0
    elif PAGE_SIZE % KEYS == 0:
        # [W]: as `read_keys`, of which the last key has the page of the first, or both are the last key of all
        keys = (tile * W + gl.arange(0, W, gl.SliceLayout(1, LAYOUT))) * KEYS
        keys = gl.maximum(gl.minimum(keys, stop_key - 1), 0)
        return gl.load(table + keys // PAGE_SIZE, mask=tile < stop, other=0)
    else:
        keys = read_keys(tile, stop_key, W, KEYS, LAYOUT)
        return gl.load(table + keys // PAGE_SIZE, mask=tile < stop, other=0)


# ---- loads


@gluon.jit
def load_queries(base, offsets, W: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Q^T [W, WIDTH, rows], the same for every warp; offsets [rows]."""
    # [WIDTH]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    # [W, WIDTH]
    everyone = gl.full([W, WIDTH], 0, gl.int32, gl.SliceLayout(2, LAYOUT)) + columns[None, :]
    return gl.load(base + offsets[None, None, :] + everyone[:, :, None])


@gluon.jit
def load_words(base, offsets, PARTS: gl.constexpr, STREAM: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, keys, PARTS, lanes, 4]: the keys at these offsets [W, keys], two elements a word.

    As words, because Triton keeps 16-bit elements that go round a loop each on its own, and to take a word apart is to
    wait for it: that belongs into the next iteration."""
    LANES: gl.constexpr = LAYOUT.threads_per_warp[3]
    # [PARTS], [lanes], [4]
    parts = gl.arange(0, PARTS, inner_layout(LAYOUT, 2))
    lanes = gl.arange(0, LANES, inner_layout(LAYOUT, 3))
    words = gl.arange(0, 4, inner_layout(LAYOUT, 4))
    # what is known when it is compiled comes last: it is the offset inside the instruction
    pointers = base + offsets[:, :, None, None, None] + lanes[None, None, None, :, None] * 4
    pointers = pointers + (parts[None, None, :, None, None] * (4 * LANES) + words[None, None, None, None, :])
    if STREAM:
        return gl.load(pointers, eviction_policy="evict_first")
    else:
        return gl.load(pointers)


@gluon.jit
def elements(words, dtype: gl.constexpr):
    """[.., 8] of 16 bits of words [.., 4]."""
    # [W, keys, PARTS, lanes, 4]
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    SHAPE: gl.constexpr = words.shape
    return gl.reshape(gl.join(low, high), [SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], 8])


@gluon.jit
def keys_of(words, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """K [W, keys, WIDTH]."""
    SHAPE: gl.constexpr = words.shape
    k = gl.reshape(elements(words, dtype), [SHAPE[0], SHAPE[1], 32 * SHAPE[2]])
    return gl.convert_layout(k, OPERAND, assert_trivial=True)


@gluon.jit
def values_of(words, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """V^T [W, WIDTH_V, keys], its rows in the order that `in_order` undoes."""
    SHAPE: gl.constexpr = words.shape
    # [W, PARTS, 8, lanes, keys]
    v = gl.permute(elements(words, dtype), (0, 2, 4, 3, 1))
    return gl.convert_layout(gl.reshape(v, [SHAPE[0], 64 * SHAPE[2], SHAPE[1]]), OPERAND, assert_trivial=True)


@gluon.jit
def in_order(acc):
    """The second product [W, WIDTH, rows] as [W, rows, WIDTH], its columns in their own order."""
    W: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    ROWS: gl.constexpr = acc.shape[2]
    # warp | part | column of 8 | lane | row
    split = gl.reshape(acc, [W, WIDTH // 64, 8, 8, ROWS])
    return gl.reshape(gl.permute(split, (0, 4, 1, 3, 2)), [W, ROWS, WIDTH])


# ---- one tile


@gluon.jit
def finite(maximum):
    """What a row is compared with: one that has seen no key keeps -inf, and -inf minus -inf would be NaN."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def probabilities(scores, last, maximum, sums, tile, scale_log2, W: gl.constexpr, KEYS: gl.constexpr):
    """One step of the online softmax, in base 2, for scores [W, keys, rows] of which row r sees the keys up to last[r].

    Returns the probabilities, the new maximum and sum, and the factor of what was accumulated, all [W, rows]."""
    LAYOUT: gl.constexpr = scores.type.layout
    # [W, keys]
    keys = tile_keys(tile, W, KEYS, gl.SliceLayout(2, LAYOUT))
    # [W, keys, rows]
    scores = gl.where(keys[:, :, None] <= last[:, None, :], scores * scale_log2, float("-inf"))
    # [W, rows]
    new = gl.maximum(maximum, gl.max(scores, 1))
    base = finite(new)
    # [W, keys, rows]
    p = gl.exp2(scores - base[:, None, :])
    # [W, rows]
    factor = gl.exp2(maximum - base)
    return p, new, sums * factor + gl.sum(p, 1), factor


# ---- the merges


@gluon.jit
def merge_warps(acc, maximum, sums, OUT: gl.constexpr):
    """The triple of the block: o [rows, WIDTH], m and l [rows], of those of its warps, acc [W, rows, WIDTH]."""
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
    return (
        gl.sum(outputs.load(OUT) * weights[:, :, None], 0),
        best,
        gl.sum(totals.load(gl.SliceLayout(2, OUT)) * weights, 0),
    )


@gluon.jit
def store_part(work, o, m, l, place, rows, total_rows, WIDTH: gl.constexpr, SPLITS: gl.constexpr):
    """This block's triple, at rows place .. place + rows - 1 of its share in the workspace."""
    ROWS: gl.constexpr = o.shape[0]
    LAYOUT: gl.constexpr = o.type.layout
    start = gl.program_id(1) * total_rows + place
    statistics = work + SPLITS * total_rows * WIDTH + place * SPLITS + gl.program_id(1)
    own = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    # [ROWS, WIDTH]
    inside = (own < rows)[:, None] & (columns >= 0)[None, :]
    gl.store(work + start * WIDTH + own[:, None] * WIDTH + columns[None, :], o, mask=inside)
    # [ROWS]
    once = gl.arange(0, ROWS, m.type.layout)
    gl.store(statistics + once * SPLITS, m, mask=once < rows)
    gl.store(statistics + SPLITS * total_rows + once * SPLITS, l, mask=once < rows)


@gluon.constexpr_function
def shares_at_once(splits, elements_per_thread):
    """How many shares the merge loads together: all if 128 registers hold them, else what 64 hold, since the loop over
    the others takes some, too."""
    if splits * elements_per_thread <= 128:
        return splits
    return max(1, 64 // elements_per_thread)


@gluon.constexpr_function
def statistics_layout(shares, rows, warps):
    """Of [shares, rows]: a thread has all shares of a row, side by side, as it has all parts in `result_layout`."""
    beside = min(warps, rows)
    registers = [[1 << bit, 0] for bit in range(shares.bit_length() - 1)]
    registers += [[0, 1 << bit] for bit in range(beside.bit_length() - 1, rows.bit_length() - 1)]
    own = [[0, 1 << bit] for bit in range(beside.bit_length() - 1)]
    copies = [[0, 0]] * ((warps // beside).bit_length() - 1)
    return gl.DistributedLinearLayout(registers, [[0, 0]] * 5, own + copies, [], [shares, rows])


@gluon.jit
def merge_parts(
    work, place, rows, total_rows, ROWS: gl.constexpr, WIDTH: gl.constexpr, SPLITS: gl.constexpr, OUT: gl.constexpr
):
    """The triple of all shares, of rows place .. place + rows - 1, past the first-level cache: others wrote them."""
    CHUNK: gl.constexpr = shares_at_once(SPLITS, ROWS * WIDTH // (32 * gl.num_warps()))
    PAIRS: gl.constexpr = gl.SliceLayout(2, OUT)
    SIDE_BY_SIDE: gl.constexpr = statistics_layout(CHUNK, ROWS, gl.num_warps())
    LAYOUT: gl.constexpr = gl.SliceLayout(0, OUT)
    own = gl.arange(0, ROWS, gl.SliceLayout(0, SIDE_BY_SIDE))
    shares = gl.arange(0, CHUNK, gl.SliceLayout(1, SIDE_BY_SIDE))
    # [CHUNK, ROWS]: statistics of CHUNK shares
    known = (own < rows)[None, :] & (shares >= 0)[:, None]
    maxima = work + SPLITS * total_rows * WIDTH + place * SPLITS + (own[None, :] * SPLITS + shares[:, None])
    own = gl.arange(0, ROWS, gl.SliceLayout(0, PAIRS))
    shares = gl.arange(0, CHUNK, gl.SliceLayout(1, PAIRS))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    # [CHUNK, ROWS], and of outputs [CHUNK, ROWS, WIDTH]
    inside = (own < rows)[None, :] & (shares >= 0)[:, None]
    parts = work + place * WIDTH + (shares[:, None] * (total_rows * WIDTH) + own[None, :] * WIDTH)[:, :, None]
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
    return o, best, total


@gluon.jit
def store_result(
    out, lse, o, m, l, sinks, seqlen_q, rows, place, stride_h, stride_m, WIDTH: gl.constexpr,
):  # fmt: skip
    """The finished rows, divided by their sums; zeros and -inf where a row saw no key. out is the output of the first
    query head of the group; lse may be None. sinks: of the rows, like l, or None."""
    LN_2: gl.constexpr = 0.6931471805599453
    ROWS: gl.constexpr = o.shape[0]
    LAYOUT: gl.constexpr = o.type.layout
    PER_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    # [ROWS], [WIDTH]
    own = gl.arange(0, ROWS, PER_ROW)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if sinks is not None:
        l = sum_with_sink(l, m, sinks)
    # [ROWS]
    total = gl.where(l == 0.0, 1.0, l)
    head, query = own // seqlen_q, own % seqlen_q
    offsets = head.to(gl.int64) * stride_h + query.to(gl.int64) * stride_m
    # [ROWS, WIDTH]
    result = o / gl.convert_layout(total, PER_ROW)[:, None]
    inside = (own < rows)[:, None] & (columns >= 0)[None, :]
    gl.store(out + offsets[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        once = gl.arange(0, ROWS, l.type.layout)
        if sinks is None:
            found = gl.where(l == 0.0, float("-inf"), (m + gl.log2(total)) * LN_2)
        else:
            found = log2_with_sink(m + gl.log2(total), l, sinks) * LN_2
        gl.store(lse + place + once, found, mask=once < rows)
