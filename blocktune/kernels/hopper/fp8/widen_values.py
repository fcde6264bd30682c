"""Values that two warps widen to float16, for the 8-bit Hopper forward, in Gluon: device functions.

float16 holds every e4m3 exactly, and its second product takes values as they are, with sums that need no stretches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORD = gl.constexpr(16)
"""Numbers that a thread loads at once."""


@gluon.constexpr_function
def part_layout(width, warps):
    """A thread's registers of as many keys as two warps load at once."""
    columns = width // WORD.value
    return gl.BlockedLayout([1, WORD.value], [32 // columns, columns], [warps, 1], [1, 0])


@gluon.jit
def widen_tile(raw, wide, READIERS: gl.constexpr):
    """Writes [BLOCK_N, head_dim_v] of e4m3 as float16, few keys at a time: these warps have few registers."""
    WIDTH: gl.constexpr = raw.shape[1]
    KEYS: gl.constexpr = 64 * READIERS * WORD // WIDTH
    for part in gl.static_range(raw.shape[0] // KEYS):
        # [KEYS, head_dim_v]
        x = raw.slice(part * KEYS, KEYS).load(part_layout(WIDTH, READIERS))
        wide.slice(part * KEYS, KEYS).store(x.to(gl.float16))
