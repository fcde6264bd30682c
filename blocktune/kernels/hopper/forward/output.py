"""How the output of the Hopper attention forward leaves, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from blocktune.kernels.hopper.common.device_functions import reinterpret
from blocktune.kernels.hopper.forward.copies import store_panel


@gluon.jit
def send_panels(
    acc, total, goal, places, C: gl.constexpr, OPTIONS: gl.constexpr, VARLEN: gl.constexpr, O_L: gl.constexpr,
):  # fmt: skip
    """Sends the accumulator over the sums of its rows to its goal, panel by panel, through the places of consumer C."""
    O_SLOTS: gl.constexpr = OPTIONS.O_SLOTS
    W: gl.constexpr = places.shape[2]
    o_desc, batch, head, row, begin, length = goal
    # panels [64, W] of [64, head_dim_v]
    parts = columns(divided(acc, total, OPTIONS.ALIGNED and not OPTIONS.MASK, O_L).to(places.dtype), W)
    for part in gl.static_range(acc.shape[1] // W):
        panel = places.index(C * O_SLOTS + part % O_SLOTS)
        tma.store_wait(O_SLOTS - 1)  # what was there has left
        panel.store(parts[part])
        fence_async_shared()
        store_panel(o_desc, batch, head, row, begin, length, part * W, panel, VARLEN)


@gluon.jit
def columns(x, W: gl.constexpr):
    """The columns of x, W by W, in the registers where they are."""
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
    """The left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def in_place_of(q_smem, place, v_smem, PANELS: gl.constexpr):
    """A tile of as many rows as Q's tile `place` has, and of V's columns, in its memory."""
    dtype: gl.constexpr = q_smem[0].dtype
    ROWS: gl.constexpr = q_smem[0].shape[1]
    WIDTH: gl.constexpr = v_smem[0].shape[2]
    LAYOUT: gl.constexpr = v_smem[0].layout
    first = reinterpret(q_smem[0].index(place), dtype, [1, ROWS, WIDTH], LAYOUT)
    if PANELS == 1:
        return (first,)
    else:
        return first, reinterpret(q_smem[1].index(place), dtype, [1, ROWS, WIDTH // 2], LAYOUT)


@gluon.jit
def write(
    acc, total, memory, place, ALIGNED: gl.constexpr, PANELS: gl.constexpr, O_L: gl.constexpr, REST_L: gl.constexpr,
):  # fmt: skip
    """The accumulators over the sums of their rows, into tile `place` of shared memory."""
    dtype: gl.constexpr = memory[0].dtype
    memory[0].index(place).store(divided(acc[0], total, ALIGNED, O_L).to(dtype))
    if PANELS == 3:
        memory[1].index(place).store(divided(acc[1], total, ALIGNED, REST_L).to(dtype))


@gluon.jit
def divided(acc, total, ALIGNED: gl.constexpr, LAYOUT: gl.constexpr):
    """acc over the sums of its rows; zeros where a row sees no key, whatever the values are, or none but infinite
    ones."""
    # [64]
    total = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    # [64, head_dim_v]
    acc = acc * inverse[:, None]
    if not ALIGNED:
        acc = gl.where((total == 0.0)[:, None], 0.0, acc)
    return acc
