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
4. What the warps have is merged at the end (kernels/hopper/decode/merges.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.sinks import sink_of
from blocktune.kernels.hopper.decode.arguments import Share, Strides

# ---- where everything is


@gluon.constexpr_function
def product_layout(warps):
    """Return the layout of both products' results: a matrix of 16 x 8 tiles for every warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def key_layout(warps):
    """Return the layout of K words [warps, keys, dim / 32, 4, 4] as MMA operand A, eight elements per thread."""
    return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 8, 1, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 1, 2, 0])


@gluon.constexpr_function
def value_layout(warps):
    """Return the layout of V words [warps, keys, dim / 64, 8, 4] as MMA operand A of a product with V^T, but for the
    order of its rows."""
    return gl.BlockedLayout([1, 2, 1, 1, 4], [1, 4, 1, 8, 1], [warps, 1, 1, 1, 1], [4, 1, 3, 2, 0])


@gluon.constexpr_function
def outer_layout(layout):
    """Return the layout of the first two dimensions of five."""
    return gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))


@gluon.constexpr_function
def inner_layout(layout, dim):
    """Return the layout of one of the last three dimensions of five."""
    for other in (4, 3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def keys_in_sight(lengths, batch, seqlen_q, seqlen_k, CAUSAL: gl.constexpr, FROM_START: gl.constexpr):
    """Return (where the keys that any row sees end, what is added to a query for the last key that it sees)."""
    length = seqlen_k
    if lengths is not None:
        length = gl.minimum(gl.load(lengths + batch), seqlen_k)
    diagonal = length - seqlen_q
    if FROM_START:
        diagonal = 0
    stop_key = length
    if CAUSAL:
        stop_key = gl.minimum(length, seqlen_q + diagonal)
    return stop_key, diagonal


@gluon.jit
def share_of(stop_key, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr):
    """Return this block's share of the keys, which end at stop_key."""
    split = gl.program_id(1)
    tiles = (gl.maximum(stop_key, 0) + BLOCK_N - 1) // BLOCK_N
    return Share(first=tiles * split // SPLITS, stop=tiles * (split + 1) // SPLITS, stop_key=stop_key)


@gluon.jit
def in_words(stride_b, stride_h, stride_n, UNIT: gl.constexpr):
    """Return the strides of keys or values in words, of those in units (kernels/base/specialize.py): products of which
    the compiler knows that UNIT divides them. The keys of an entry are counted with 32 bits."""
    if UNIT == 1:
        return Strides(stride_b, stride_h, stride_n)
    else:
        return Strides(gl.cast(stride_b, gl.int64) * UNIT, gl.cast(stride_h, gl.int64) * UNIT, stride_n * UNIT)


@gluon.jit
def in_elements(stride_b, stride_h, stride_m, UNIT: gl.constexpr):
    """Return the strides of queries or outputs in elements, of those in units."""
    if UNIT == 1:
        return Strides(stride_b, stride_h, stride_m)
    else:
        return Strides(
            gl.cast(stride_b, gl.int64) * UNIT, gl.cast(stride_h, gl.int64) * UNIT, gl.cast(stride_m, gl.int64) * UNIT
        )


@gluon.jit
def words_of_head(tensor, batch, head_kv, strides, PAGE_SIZE: gl.constexpr):
    """Return where the words of a key head begin, in its entry, or in the whole cache if it has pages."""
    words = tensor.to(gl.pointer_type(gl.int32), bitcast=True) + head_kv.to(gl.int64) * strides.head
    if PAGE_SIZE == 0:
        words += batch * strides.batch
    return words


@gluon.jit
def query_offsets(batch, head_kv, sizes, strides, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where the packed rows of the queries [ROWS] begin; beyond the last one the last row again, which is not
    stored."""
    seqlen_q = sizes.seqlen_q
    # [ROWS]
    packed = gl.minimum(gl.arange(0, ROWS, LAYOUT), sizes.group_size * seqlen_q - 1)
    head = head_kv * sizes.group_size + packed // seqlen_q
    return batch * strides.batch + head.to(gl.int64) * strides.head + (packed % seqlen_q).to(gl.int64) * strides.row


@gluon.jit
def sinks_of_rows(sinks, head_kv, sizes, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the sinks [ROWS] of the packed rows."""
    # [ROWS]
    row = gl.minimum(gl.arange(0, ROWS, LAYOUT), sizes.group_size * sizes.seqlen_q - 1)
    return sink_of(sinks, head_kv * sizes.group_size + row // sizes.seqlen_q)


@gluon.jit
def last_keys(
    stop_key, diagonal, seqlen_q, CAUSAL: gl.constexpr, W: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return the last key that a row sees [W, ROWS]."""
    last = gl.full([W, ROWS], stop_key - 1, gl.int32, LAYOUT)
    if CAUSAL:
        # [ROWS]
        query = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)) % seqlen_q
        last = gl.minimum(last, (query + diagonal)[None, :])
    return last


@gluon.jit
def tile_keys(tile, W: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return every warp's keys of a tile [W, KEYS]."""
    # [W], [KEYS]
    warps = gl.arange(0, W, gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    return tile * (W * KEYS) + warps[:, None] * KEYS + keys[None, :]


@gluon.jit
def read_keys(tile, stop_key, W: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the keys that are read for those of a tile: instead of what lies right of the last key, which may be NaN
    that no probability of zero would undo, that key is read again."""
    return gl.maximum(gl.minimum(tile_keys(tile, W, KEYS, LAYOUT), stop_key - 1), 0)


@gluon.jit
def key_offsets(
    tile, stop_key, pages, strides, PAGE_SIZE: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return where the keys of a tile begin, in words from the first of the entry, or of the cache if it has pages."""
    # [W, KEYS]
    keys = read_keys(tile, stop_key, W, KEYS, LAYOUT)
    if PAGE_SIZE == 0:
        return keys * strides.row
    elif PAGE_SIZE % KEYS == 0:
        return (pages.to(gl.int64) * strides.batch)[:, None] + (keys % PAGE_SIZE) * strides.row
    else:
        return pages.to(gl.int64) * strides.batch + (keys % PAGE_SIZE).to(gl.int64) * strides.row


@gluon.jit
def load_pages(table, tile, share, PAGE_SIZE: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the page of every key of a tile: [W] where the keys of a warp share one, else [W, KEYS]. Right of the share,
    where the table may hold anything, none is read."""
    if PAGE_SIZE == 0:
        return 0
    elif PAGE_SIZE % KEYS == 0:
        # [W]: as `read_keys`, of which the last key has the page of the first, or both are the last key of all
        keys = (tile * W + gl.arange(0, W, gl.SliceLayout(1, LAYOUT))) * KEYS
        keys = gl.maximum(gl.minimum(keys, share.stop_key - 1), 0)
        return gl.load(table + keys // PAGE_SIZE, mask=tile < share.stop, other=0)
    else:
        keys = read_keys(tile, share.stop_key, W, KEYS, LAYOUT)
        return gl.load(table + keys // PAGE_SIZE, mask=tile < share.stop, other=0)


# ---- loads


@gluon.jit
def load_queries(base, offsets, W: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Load Q^T [W, WIDTH, rows], the same for every warp, zeros from column DIM on; offsets [rows]."""
    # [WIDTH]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    # [W, WIDTH]
    everyone = gl.full([W, WIDTH], 0, gl.int32, gl.SliceLayout(2, LAYOUT)) + columns[None, :]
    pointers = base + offsets[None, None, :] + everyone[:, :, None]
    if DIM == WIDTH:
        return gl.load(pointers)
    else:
        return gl.load(pointers, mask=everyone[:, :, None] < DIM, other=0.0)


@gluon.jit
def load_words(base, offsets, DIM: gl.constexpr, PARTS: gl.constexpr, STREAM: gl.constexpr, LAYOUT: gl.constexpr):
    """Load [W, keys, PARTS, lanes, 4]: the keys at these offsets [W, keys], two elements a word; zeros from element DIM
    on, a multiple of 8, which are not read.

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
    POLICY: gl.constexpr = "evict_first" if STREAM else ""
    if DIM == 8 * LANES * PARTS:
        return gl.load(pointers, eviction_policy=POLICY)
    else:
        begin = parts[None, None, :, None, None] * (4 * LANES) + lanes[None, None, None, :, None] * 4
        return gl.load(pointers, mask=begin < DIM // 2, other=0, eviction_policy=POLICY)


@gluon.jit
def elements(words, dtype: gl.constexpr):
    """Return [.., 8] of 16 bits of words [.., 4]."""
    # [W, keys, PARTS, lanes, 4]
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    SHAPE: gl.constexpr = words.shape
    return gl.reshape(gl.join(low, high), [SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], 8])


@gluon.jit
def keys_of(words, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Return K [W, keys, WIDTH] as an operand."""
    SHAPE: gl.constexpr = words.shape
    k = gl.reshape(elements(words, dtype), [SHAPE[0], SHAPE[1], 32 * SHAPE[2]])
    return gl.convert_layout(k, OPERAND, assert_trivial=True)


@gluon.jit
def values_of(words, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """Return V^T [W, WIDTH_V, keys] as an operand, its rows in the order that `in_order` undoes."""
    SHAPE: gl.constexpr = words.shape
    # [W, PARTS, 8, lanes, keys]
    v = gl.permute(elements(words, dtype), (0, 2, 4, 3, 1))
    return gl.convert_layout(gl.reshape(v, [SHAPE[0], 64 * SHAPE[2], SHAPE[1]]), OPERAND, assert_trivial=True)


@gluon.jit
def in_order(acc):
    """Return the second product [W, WIDTH, rows] as [W, rows, WIDTH], its columns in their own order."""
    W: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    ROWS: gl.constexpr = acc.shape[2]
    # warp | part | column of 8 | lane | row
    split = gl.reshape(acc, [W, WIDTH // 64, 8, 8, ROWS])
    return gl.reshape(gl.permute(split, (0, 4, 1, 3, 2)), [W, ROWS, WIDTH])


# ---- one tile


@gluon.jit
def finite(maximum):
    """Return what a row is compared with: one that has seen no key keeps -inf, and -inf minus -inf would be NaN."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def probabilities(scores, last, maximum, sums, tile, scale_log2, W: gl.constexpr, KEYS: gl.constexpr):
    """Take one step of the online softmax, in base 2, for scores [W, keys, rows] of which row r sees the keys up to
    last[r].

    Return the probabilities, the new maximum and sum, and the factor of what was accumulated, all [W, rows]."""
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
