"""The copies of keys, values and scales of tokens into a ring of tiles, in Gluon: device functions.

A place of the ring holds a tile: its keys, its values, and their scales where tokens have some. Copies are
asynchronous, one group a tile.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.9 renamed the copy.
copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class Cache(NamedTuple):
    """Where the keys of a key head are.

    k, v: words, k_scales, v_scales: numbers; of the entry, or of the whole cache if it has pages, whose numbers are in
    table. stride_*: (entry or page, row). stop: the tile that ends the share. stop_key: the key that ends all.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    table: Any
    stride_k: Any
    stride_v: Any
    stride_ks: Any
    stride_vs: Any
    stop: Any
    stop_key: Any


class Ring(NamedTuple):
    """Shared memory of some tiles: words k, v [places, keys, words], float32 k_scales, v_scales [places, keys], or None
    where no token has a scale."""

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any


@gluon.constexpr_function
def copy_layout(warps, words):
    """Of the words [keys, words] that threads copy, four each."""
    return gl.BlockedLayout([1, 4], [128 // words, words // 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def key_memory():
    """Of the words of keys. Eight threads load 64 bytes each of two keys at one time: these halves of rows are swizzled
    against each other."""
    return gl.SwizzledSharedLayout(16, 1, 2, [1, 0])


@gluon.constexpr_function
def value_memory():
    """Of the words of values. A warp loads two times 16 bytes of four keys at one time, which are every other one."""
    return gl.SwizzledSharedLayout(4, 1, 8, [1, 0])


@gluon.jit
def new_words(STAGES: gl.constexpr, KEYS: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Memory for the words of as many tiles."""
    return gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, WORDS], LAYOUT)


@gluon.jit
def new_scales(STAGES: gl.constexpr, KEYS: gl.constexpr):
    """Memory for the scales of as many tiles."""
    return gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def read_keys(cache, tile, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """[KEYS]: the keys that are read for those of a tile: instead of what lies behind the last key, which may be NaN
    that no probability of zero would undo, that key is read again."""
    return gl.maximum(gl.minimum(tile * KEYS + gl.arange(0, KEYS, LAYOUT), cache.stop_key - 1), 0)


@gluon.jit
def load_pages(cache, tile, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """The page of every key of a tile: one number where they share it, else [KEYS]. Behind the share, where the table
    may hold anything, none is read."""
    if PAGE_SIZE == 0:
        return 0
    elif PAGE_SIZE % KEYS == 0:
        return gl.load(cache.table + tile * KEYS // PAGE_SIZE, mask=tile < cache.stop, other=0)
    else:
        keys = read_keys(cache, tile, KEYS, LAYOUT)
        return gl.load(cache.table + keys // PAGE_SIZE, mask=tile < cache.stop, other=0)


@gluon.jit
def row_offsets(keys, pages, stride, PAGE_SIZE: gl.constexpr):
    """[KEYS]: where the rows of these keys begin."""
    if PAGE_SIZE == 0:
        return keys * stride[1]
    else:
        return pages.to(gl.int64) * stride[0] + (keys % PAGE_SIZE) * stride[1]


@gluon.jit
def copy_words(memory, base, offsets, LAYOUT: gl.constexpr):
    """Start to copy the rows at these offsets [KEYS] to memory [KEYS, words]."""
    # [words]
    words = gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT))
    copy_ahead(memory, base + offsets[:, None] + words[None, :])


@gluon.jit
def copy_tile(ring, place, cache, tile, pages, PAGE_SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy a tile, whose keys have these pages, to a place of the ring, unless it is behind the share: a group
    of copies either way."""
    if tile < cache.stop:
        keys = read_keys(cache, tile, ring.k.shape[1], gl.SliceLayout(1, LAYOUT))
        copy_words(ring.k.index(place), cache.k, row_offsets(keys, pages, cache.stride_k, PAGE_SIZE), LAYOUT)
        copy_words(ring.v.index(place), cache.v, row_offsets(keys, pages, cache.stride_v, PAGE_SIZE), LAYOUT)
        if ring.k_scales is not None:
            k_scales = cache.k_scales + row_offsets(keys, pages, cache.stride_ks, PAGE_SIZE)
            v_scales = cache.v_scales + row_offsets(keys, pages, cache.stride_vs, PAGE_SIZE)
            copy_ahead(ring.k_scales.index(place), k_scales)
            copy_ahead(ring.v_scales.index(place), v_scales)
    async_copy.commit_group()
