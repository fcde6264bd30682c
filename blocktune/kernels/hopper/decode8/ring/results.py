"""What a block of the ring leaves to the merge of the portable kernels, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store_share(work, o, m, l, place, rows, total_rows, SPLITS: gl.constexpr):
    """This block's triple, o [ROWS, WIDTH], m and l [ROWS], at rows place .. place + rows - 1 of its share in the
    workspace of kernels/portable/decode/tiles.py."""
    ROWS: gl.constexpr = o.shape[0]
    WIDTH: gl.constexpr = o.shape[1]
    LAYOUT: gl.constexpr = o.type.layout
    places = gl.program_id(1) * total_rows.to(gl.int64) + place
    statistics = work + SPLITS * total_rows.to(gl.int64) * WIDTH + places
    # [ROWS], [WIDTH]
    own = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (own < rows)[:, None] & (columns >= 0)[None, :]
    gl.store(work + places * WIDTH + own[:, None] * WIDTH + columns[None, :], o, mask=inside)
    gl.store(statistics + own, m, mask=own < rows)
    gl.store(statistics + SPLITS * total_rows.to(gl.int64) + own, l, mask=own < rows)
