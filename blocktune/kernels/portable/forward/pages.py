"""Keys and values in the pages of a cache: device functions of decoding and of the general forward.

A table says which page each PAGE_SIZE keys of a sequence are in. Rows of a tile have their addresses from there.
"""

import triton
import triton.language as tl

# No module-level tl.constexpr: see kernels/portable/forward/tiles.py.


@triton.jit
def load_pages(table, tile, stop_key, OPTIONS: tl.constexpr):
    """Return the page of every key of a tile: a scalar where the tile lies in one page, else [BLOCK_N]. 0 behind the
    keys, where the table may hold anything."""
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    if OPTIONS.PAGE_SIZE >= BLOCK_N:
        first = tile * BLOCK_N
        return tl.load(table + first // OPTIONS.PAGE_SIZE, mask=first < stop_key, other=0).to(tl.int64)
    else:
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + columns // OPTIONS.PAGE_SIZE, mask=columns < stop_key, other=0).to(tl.int64)


@triton.jit
def load_paged(
    matrix, page_stride, pages, columns, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the rows `columns` [BLOCK_N] of a `Matrix` in the pages that `load_pages` has found, as [BLOCK_N, WIDTH],
    zeros outside."""
    rows = pages * page_stride + (columns % PAGE_SIZE).to(tl.int64) * matrix.stride
    places = tl.arange(0, WIDTH)
    # [BLOCK_N, WIDTH]
    pointers = matrix.base + rows[:, None] + places[None, :]
    if CHECK_ROWS and DIM != WIDTH:
        return tl.load(pointers, mask=(columns[:, None] < matrix.rows) & (places[None, :] < DIM), other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=columns[:, None] < matrix.rows, other=0.0)
    elif DIM != WIDTH:
        return tl.load(pointers, mask=places[None, :] < DIM, other=0.0)
    else:
        return tl.load(pointers)
