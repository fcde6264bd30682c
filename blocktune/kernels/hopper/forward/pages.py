"""Keys and values of a cache in the Hopper attention forward, in Gluon: whole entries, and pages.

A block of keys comes by one copy for every page that it has a part of, or by one copy where it is a part of a page, and
by 64 columns at a time, so that what a copy brings lies next to each other in shared memory. All copies of a block
complete on the block's own barrier.

Every row has a number in the memory of a cache, counted in steps of a row: an entry or page begins at a multiple of
`page_rows`. So a cache has the descriptor of packed sequences (`describe_packed` in
kernels/hopper/common/descriptors.py), and a copy ends where the sequence ends, which may be inside of a page. Behind
the last key a table may hold anything: nothing is read there, and the copies bring zeros.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.device_functions import as_block, copy_in, reinterpret
from blocktune.kernels.hopper.common.head_rows import HeadRows
from blocktune.kernels.hopper.forward.copies import load_rows, panel, panels


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
        BANDS: gl.constexpr = tile.shape[1] // COLUMNS
        tiles = reinterpret(tile, tile.dtype, [BANDS * PARTS, ROWS, COLUMNS], tile.layout)
        for band in gl.static_range(BANDS):
            block = as_block(desc, tiles.index(band * PARTS + PART))
            column = (p * BANDS + band) * COLUMNS
            copy_in(desc, [1 << 30, end, rows.head, (1 << 30) - count, column], barrier, block)
