"""What a block of the ring leaves to the merge of the portable kernels, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store_share(work, found, rows, total_rows, SPLITS: gl.constexpr):
    """Store what this block found at its rows of its share in the workspace of kernels/portable/decode/tiles.py."""
    o = found.o
    ROWS: gl.constexpr = o.shape[0]
    WIDTH: gl.constexpr = o.shape[1]
    LAYOUT: gl.constexpr = o.type.layout
    places = gl.program_id(1) * total_rows.to(gl.int64) + rows.place
    statistics = work + SPLITS * total_rows.to(gl.int64) * WIDTH + places
    # [ROWS], [WIDTH]
    own = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (own < rows.count)[:, None] & (columns >= 0)[None, :]
    gl.store(work + places * WIDTH + own[:, None] * WIDTH + columns[None, :], o, mask=inside)
    gl.store(statistics + own, found.m, mask=own < rows.count)
    gl.store(statistics + SPLITS * total_rows.to(gl.int64) + own, found.l, mask=own < rows.count)
