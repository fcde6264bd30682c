"""Decoding over an 8-bit cache from memory to the tensor cores' registers, in Gluon: device functions.

kernels/hopper/decode/tiles.py with other operands, which are those of kernels/portable/decode8/tiles.py: both products
are taken in float16, rows of bfloat16 queries are multiplied by a power of two before and their scores by its inverse,
and probabilities are multiplied by 2^14.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.decode.tiles import finite, inner_layout, key_offsets, tile_keys
from blocktune.kernels.hopper.decode8.numbers import column_of


@gluon.constexpr_function
def value_layout(warps, words):
    """Of the words of V [warps, keys, 1, 8, words]: operand A of a product with V^T, but for the order of rows."""
    return gl.BlockedLayout([1, 2, 1, 1, words], [1, 4, 1, 8, 1], [warps, 1, 1, 1, 1], [4, 1, 3, 2, 0])


@gluon.jit
def load_words(base, offsets, PARTS: gl.constexpr, WORDS: gl.constexpr, STREAM: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, keys, PARTS, lanes, WORDS]: the keys at these offsets [W, keys], four numbers a word."""
    LANES: gl.constexpr = LAYOUT.threads_per_warp[3]
    # [PARTS], [lanes], [WORDS]
    parts = gl.arange(0, PARTS, inner_layout(LAYOUT, 2))
    lanes = gl.arange(0, LANES, inner_layout(LAYOUT, 3))
    words = gl.arange(0, WORDS, inner_layout(LAYOUT, 4))
    pointers = base + offsets[:, :, None, None, None] + lanes[None, None, None, :, None] * WORDS
    pointers = pointers + (parts[None, None, :, None, None] * (WORDS * LANES) + words[None, None, None, None, :])
    if STREAM:
        return gl.load(pointers, eviction_policy="evict_first")
    else:
        return gl.load(pointers)


@gluon.jit
def load_queries(base, offsets, W: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Q^T [W, WIDTH, rows] in the order of columns that K has, the same for every warp; offsets [rows]."""
    # [WIDTH]
    columns = column_of(gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))))
    # [W, WIDTH]
    everyone = gl.full([W, WIDTH], 0, gl.int32, gl.SliceLayout(2, LAYOUT)) + columns[None, :]
    return gl.load(base + offsets[None, None, :] + everyone[:, :, None])


@gluon.jit
def in_range(q):
    """(q [W, WIDTH, rows] as float16, [W, rows] what the scores of each row are to be multiplied with)."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, q.type.layout)
    if q.dtype == gl.float16:
        return q, gl.full([q.shape[0], q.shape[2]], 1.0, gl.float32, LAYOUT)
    else:
        numbers = q.to(gl.float32)
        bits = gl.max(gl.maximum(numbers, 0.0 - numbers), 1).to(gl.int32, bitcast=True)
        exponents = gl.maximum(bits >> 23, 14)  # biased by 127
        up = ((267 - exponents) << 23).to(gl.float32, bitcast=True)
        return (numbers * up[:, None, :]).to(gl.float16), ((exponents - 13) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scales_of_head(scales, batch, head, strides, IN_PAGES: gl.constexpr, OF_TOKENS: gl.constexpr):
    """(where the scales of a key head begin, what all of its numbers are multiplied with): the first counts where every
    token has one, the second where the head has."""
    scales += head * strides.head
    if not (IN_PAGES and OF_TOKENS):
        scales += batch * strides.batch
    if OF_TOKENS:
        return scales, 1.0
    else:
        return scales, gl.load(scales)


@gluon.jit
def load_scales(
    base, tile, stop_key, pages, strides, PAGE_SIZE: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """[W, KEYS]: the scales of a tile's keys."""
    return gl.load(base + key_offsets(tile, stop_key, pages, strides, PAGE_SIZE, W, KEYS, LAYOUT))


@gluon.jit
def magnitude_log2(scales):
    """About log2 of |scales|: at most 0.09 below it; -100 for the smallest, and for 0."""
    bits = scales.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.maximum(bits.to(gl.float32) * (1.0 / 8388608.0) - 127.0, -100.0)


@gluon.jit
def visible_scores(scores, last, tile, W: gl.constexpr, KEYS: gl.constexpr):
    """scores [W, keys, rows], of which row r sees the keys up to last[r]: -inf elsewhere."""
    # [W, keys]
    keys = tile_keys(tile, W, KEYS, gl.SliceLayout(2, scores.type.layout))
    return gl.where(keys[:, :, None] <= last[:, None, :], scores, float("-inf"))


@gluon.jit
def largest_height(heights):
    """Return the largest height [W, rows] of heights [W, keys, rows], rounded up: `largest_height` of
    kernels/portable/decode8/tiles.py says why."""
    height = gl.max(heights, 1)
    above = gl.maximum(height * 1.00000011920929, height * 0.99999988079071)  # one number of float32
    return gl.where(gl.abs(height) < 268435456.0, above, height)


@gluon.jit
def weights_step(scores, largest, maximum, sums):
    """Take one step of the online softmax, in base 2. Return the probabilities [W, keys, rows], the new reference and
    sum, and the factor of what was accumulated, all [W, rows].

    The reference is the largest of the heights [W, rows] of all tiles: the scores, plus log2 of the scales that
    probabilities will be multiplied with.
    """
    # [W, rows]
    new = gl.maximum(maximum, largest)
    base = finite(new)
    # [W, keys, rows]
    p = gl.exp2(scores - base[:, None, :])
    # [W, rows]
    factor = gl.exp2(maximum - base)
    return p, new, sums * factor + gl.sum(p, 1), factor
