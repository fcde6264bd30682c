"""Copies of the Hopper attention forward, and how its slots are given back, in Gluon.

Tiles of shared memory are a tuple: (tiles [count, rows, width],), or where the width is no power of two (96 and 192),
but three panels of W columns, (tiles [count, rows, 2 W], tiles [count, rows, W]): products take the first two panels
together and then the third. Copies move one panel at a time; a swizzle is as wide as one, so that a tile [rows, 2 W]
lies in memory as two of them do.

A block of keys in pages of a cache comes by one copy for every page that it has a part of, or by one where it is a part
of a page, and by one swizzle's columns at a time: what a copy brings lies next to each other in shared memory. All
copies of a block complete on the block's own barrier. Every row of a cache has a number, counted in steps of a row: an
entry or page begins at a multiple of `page_rows`. So a cache has the descriptor of packed sequences, and a copy ends
where the sequence ends, which may be inside of a page. After the last key a table may hold anything: nothing is read
there, and the copies bring zeros.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocktune.kernels.hopper.common.device_functions import as_block, copy_in, reinterpret
from blocktune.kernels.hopper.common.head_rows import HeadRows, store_panel
from blocktune.kernels.hopper.common.slots import next_slot


@gluon.constexpr_function
def panels(memory):
    """Return how many copies a tile takes."""
    return 1 if len(memory) == 1 else 3


@gluon.jit
def panel(memory, place, PART: gl.constexpr):
    """Return what one copy moves of tile `place`."""
    if len(memory) == 1:
        return memory[0].index(place)
    elif PART == 2:
        return memory[1].index(place)
    else:
        both = memory[0].index(place)
        ROWS: gl.constexpr = both.shape[0]
        W: gl.constexpr = both.shape[1] // 2
        return reinterpret(both, both.dtype, [2, ROWS, W], both.layout).index(PART)


@gluon.jit
def load_rows(rows, row, barrier, memory, place):
    """Copy a tile of a head from `row` on into tile `place` of shared memory; zeros beyond the end.

    The end of a packed sequence is inside the tensor. Its descriptor (`describe_packed` in
    kernels/hopper/common/descriptors.py) has a dimension of 2^30 rows that ends where the sequence ends, so that the
    copy engine clips there, too.
    """
    desc = rows.desc
    W: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    for part in gl.static_range(panels(memory)):
        block = as_block(desc, panel(memory, place, part))
        if len(desc.block_type.shape) == 4:
            copy_in(desc, [rows.batch, rows.head, row, part * W], barrier, block)
        else:
            end = rows.begin + rows.length
            copy_in(desc, [1 << 30, end, rows.head, (1 << 30) - rows.length + row, part * W], barrier, block)


class PagedRows(NamedTuple):
    """The rows of a head in the pages of a sequence.

    length: how many there are. line: a pointer to the page of the first ones. page_rows: from a page to the next one.
    """

    desc: Any
    head: Any
    length: Any
    line: Any
    page_rows: Any


@gluon.jit
def rows_of_keys(desc, batch, head, sequence, page_rows, tensors, sizes):
    """Return the `HeadRows` or `PagedRows` of a head's keys or values. page_rows: from an entry or page to the next
    one."""
    if tensors.table is not None:
        line = tensors.table + batch.to(gl.int64) * sizes.table_line
        return PagedRows(desc=desc, head=head, length=sequence.seqlen_k, line=line, page_rows=page_rows)
    elif tensors.lengths is not None:
        return HeadRows(desc, batch, head, batch * page_rows, sequence.seqlen_k)
    else:
        return HeadRows(desc, batch, head, sequence.begin_k, sequence.seqlen_k)


@gluon.constexpr_function
def parts_of_block(options):
    """Return how many pages the keys of a block are in; 0 where there are no pages."""
    return max(1, options.BLOCK_N // options.PAGE_SIZE) if options.PAGE_SIZE else 0


@gluon.jit
def pages_of_block(rows, row, OPTIONS: gl.constexpr):
    """Return the pages of the rows of a block from `row` on, 0 behind the last row; none where there are no pages.

    They are on their way while the block's slot is waited for.
    """
    pages = ()
    for part in gl.static_range(parts_of_block(OPTIONS)):
        first = row + part * OPTIONS.PAGE_SIZE
        pages += (gl.load(rows.line + first // OPTIONS.PAGE_SIZE, mask=first < rows.length, other=0),)  # type: ignore
    return pages


@gluon.jit
def load_block(rows, row, pages, barrier, memory, place, OPTIONS: gl.constexpr):
    """Copy a block of keys or values from `row` on into tile `place` of shared memory; zeros beyond the end."""
    if OPTIONS.PAGE_SIZE == 0:
        load_rows(rows, row, barrier, memory, place)
    else:
        PARTS: gl.constexpr = parts_of_block(OPTIONS)
        for part in gl.static_range(PARTS):
            load_part(rows, row + part * OPTIONS.PAGE_SIZE, pages[part], barrier, memory, place, part, PARTS, OPTIONS)


@gluon.jit
def load_part(rows, row, page, barrier, memory, place, PART: gl.constexpr, PARTS: gl.constexpr, OPTIONS: gl.constexpr):
    """Copy what a block has of one page: the rows from `row` on."""
    desc = rows.desc
    ROWS: gl.constexpr = desc.block_type.shape[3]
    COLUMNS: gl.constexpr = desc.block_type.shape[4]
    count = gl.minimum(gl.maximum(rows.length - row, 0), ROWS)
    end = page * rows.page_rows + row % OPTIONS.PAGE_SIZE + count
    for p in gl.static_range(panels(memory)):
        tile = panel(memory, place, p)
        # no constexpr has a name here: panels would give it one after the other
        tiles = reinterpret(tile, tile.dtype, [tile.shape[1] // COLUMNS * PARTS, ROWS, COLUMNS], tile.layout)
        for band in gl.static_range(tile.shape[1] // COLUMNS):
            block = as_block(desc, tiles.index(band * PARTS + PART))
            column = p * tile.shape[1] + band * COLUMNS
            copy_in(desc, [1 << 30, end, rows.head, (1 << 30) - count, column], barrier, block)


@gluon.jit
def store_rows(rows, row, memory, place):
    """Copy a tile back as `load_rows` brought it: what lies beyond the end is not written."""
    W: gl.constexpr = rows.desc.block_type.shape[len(rows.desc.block_type.shape) - 1]
    for part in gl.static_range(panels(memory)):
        store_panel(rows, row, part * W, panel(memory, place, part))


@gluon.jit
def release(memory, place, OPTIONS: gl.constexpr):
    """Give a whole slot back."""
    mbarrier.arrive(memory.k_empty.index(place), count=1)
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(place), count=1)


@gluon.jit
def release_values(memory, place, OPTIONS: gl.constexpr):
    """Give a slot back whose V is read: all of it, or with separate releases what its K left."""
    if OPTIONS.SPLIT_RELEASE:
        mbarrier.arrive(memory.v_empty.index(place), count=1)
    else:
        mbarrier.arrive(memory.k_empty.index(place), count=1)


@gluon.jit
def hand_back(count, memory, slot, OPTIONS: gl.constexpr):
    """Give slots back unused, and return the next one. Each is awaited first: an arrival ahead of its turn would count
    for the slot's use before, which other warpgroups may not have finished."""
    for i in range(count):
        mbarrier.wait(memory.full.index(slot.place), slot.parity)
        release(memory, slot.place, OPTIONS)
        slot = next_slot(slot, OPTIONS.STAGES)
    return slot


@gluon.jit
def unseen_slots(blocks, ONE_RING: gl.constexpr):
    """Return how many slots are before the first step, or after the last one, of a warpgroup that sees fewer blocks
    than its tile. In one ring, one tile of these blocks is among its own: it is given back there."""
    if ONE_RING:
        return gl.maximum(2 * blocks - 1, 0)
    else:
        return blocks
