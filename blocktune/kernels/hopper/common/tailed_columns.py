"""Columns of tiles of the Hopper attention backward, in Gluon: all of a tile, or 64 and a tail beyond them, apart.

The products of 65 to 96 columns take no more of them: Triton's tiles are powers of two, those of memory and of
accumulators, so that a product of 128 columns becomes one of 64 and one of 16 or 32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def count_panels(options):
    """Return in how many panels products take the columns of a head."""
    return 2 if options.TAIL else 1


@gluon.jit
def panel_of(tile, PANEL: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the columns of a panel of a tile [rows, columns] of shared memory."""
    if OPTIONS.TAIL == 0:
        return tile
    elif PANEL == 0:
        return tile.slice(0, 64, dim=1)
    else:
        TAIL: gl.constexpr = OPTIONS.TAIL
        return tile.slice(64, TAIL, dim=1)


@gluon.jit
def two_panels(OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Return zeros for a gradient of 64 keys with a tail."""
    TAIL: gl.constexpr = OPTIONS.TAIL
    first = gl.zeros([64, 64], gl.float32, LAYOUTS.gradients)
    return first, gl.zeros([64, TAIL], gl.float32, LAYOUTS.tail)


@gluon.jit
def scaled(panels, factor):
    """Return panels times a factor."""
    if len(panels) == 1:
        return (panels[0] * factor,)
    else:
        return panels[0] * factor, panels[1] * factor


@gluon.jit
def multiply_rows(rows, columns, start, UPON: gl.constexpr, OPTIONS: gl.constexpr):
    """Issue rows columns^T of two tiles of shared memory, upon `start` or (not UPON) alone."""
    product = warpgroup_mma(
        panel_of(rows, 0, OPTIONS), panel_of(columns, 0, OPTIONS).permute((1, 0)), start, use_acc=UPON, is_async=True
    )
    if OPTIONS.TAIL:
        rest = panel_of(columns, 1, OPTIONS).permute((1, 0))
        product = warpgroup_mma(panel_of(rows, 1, OPTIONS), rest, product, is_async=True)
    return product


@gluon.jit
def add_to_gradient(x, tile, panels, OPTIONS: gl.constexpr, LAYOUTS: gl.constexpr):
    """Issue panels += x tile, x an operand of 64 keys, tile in shared memory."""
    first = warpgroup_mma(x, panel_of(tile, 0, OPTIONS), panels[0], is_async=True)
    if len(panels) == 1:
        return (first,)
    else:
        rest = gl.convert_layout(x, LAYOUTS.tail_p)
        return first, warpgroup_mma(rest, panel_of(tile, 1, OPTIONS), panels[1], is_async=True)


@gluon.jit
def await_gradient(panels, PENDING: gl.constexpr):
    """Return panels once PENDING products are left in flight."""
    if len(panels) == 1:
        return (warpgroup_mma_wait(PENDING, deps=(panels[0],)),)
    else:
        first, rest = warpgroup_mma_wait(PENDING, deps=(panels[0], panels[1]))
        return first, rest


@gluon.jit
def await_gradient_and(panels, other, PENDING: gl.constexpr):
    """Return panels and another product once PENDING products are left in flight."""
    if len(panels) == 1:
        first, other = warpgroup_mma_wait(PENDING, deps=(panels[0], other))
        return (first,), other
    else:
        first, rest, other = warpgroup_mma_wait(PENDING, deps=(panels[0], panels[1], other))
        return (first, rest), other
