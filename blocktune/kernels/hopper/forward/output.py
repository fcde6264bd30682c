"""How the output of the Hopper attention forward leaves, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocktune.kernels.hopper.common.device_functions import reinterpret
from blocktune.kernels.hopper.common.head_rows import store_panel


@gluon.jit
def send_panels(
    acc, total, rows, row, places, C: gl.constexpr, O_SLOTS: gl.constexpr, ALIGNED: gl.constexpr, O_L: gl.constexpr
):
    """Send the accumulator over the sums of its rows on its way, panel by panel, through the places of consumer C."""
    W: gl.constexpr = places.shape[2]
    # panels [64, W] of [64, head_dim_v]
    parts = columns(divided(acc, total, ALIGNED, O_L).to(places.dtype), W)
    for part in gl.static_range(acc.shape[1] // W):
        panel = places.index(C * O_SLOTS + part % O_SLOTS)
        tma.store_wait(O_SLOTS - 1)  # what was there has left
        panel.store(parts[part])
        fence_async_shared()
        store_panel(rows, row, part * W, panel)


@gluon.jit
def columns(x, W: gl.constexpr):
    """Return the columns of x, W by W, in the registers where they are."""
    if x.shape[1] == W:
        return (x,)
    elif x.shape[1] == 2 * W:
        left, right = halves(x)
        return left, right
    else:
        left, right = halves(x)
        first, second = halves(left)
        third, fourth = halves(right)
        return first, second, third, fourth


@gluon.jit
def halves(x):
    """Return the left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def in_place_of(q_smem, place, v_smem):
    """Return a tile of as many rows as Q's tile `place` has, and of V's columns, in its memory."""
    dtype: gl.constexpr = q_smem[0].dtype
    ROWS: gl.constexpr = q_smem[0].shape[1]
    WIDTH: gl.constexpr = v_smem[0].shape[2]
    LAYOUT: gl.constexpr = v_smem[0].layout
    first = reinterpret(q_smem[0].index(place), dtype, [1, ROWS, WIDTH], LAYOUT)
    if len(v_smem) == 1:
        return (first,)
    else:
        return first, reinterpret(q_smem[1].index(place), dtype, [1, ROWS, WIDTH // 2], LAYOUT)


@gluon.jit
def write(acc, total, memory, place, ALIGNED: gl.constexpr, LAYOUTS: gl.constexpr):
    """Write the accumulators over the sums of their rows into tile `place` of shared memory."""
    dtype: gl.constexpr = memory[0].dtype
    memory[0].index(place).store(divided(acc[0], total, ALIGNED, LAYOUTS.out).to(dtype))
    if len(acc) == 2:
        memory[1].index(place).store(divided(acc[1], total, ALIGNED, LAYOUTS.rest).to(dtype))


@gluon.jit
def divided(acc, total, ALIGNED: gl.constexpr, LAYOUT: gl.constexpr):
    """Return acc over the sums of its rows; zeros where a row sees no key, whatever the values are, or none but
    infinite ones."""
    # [64]
    total = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    # [64, head_dim_v]
    acc = acc * inverse[:, None]
    if not ALIGNED:
        acc = gl.where((total == 0.0)[:, None], 0.0, acc)
    return acc
