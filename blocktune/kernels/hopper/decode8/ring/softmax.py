"""The softmax of a tile, for rows whose references rarely move, in Gluon: device functions.

exp2(score - reference) is right for any reference of a row that keeps it in the range of float16, and the largest score
is only one of them. So the references move, and what was accumulated with them, only where a number leaves that range.
Whether any does is one number for all warps, where the maxima of all rows would be one for each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.decode8.ring.operands import bits

HEIGHT = gl.constexpr(7.0)
"""log2 of what the largest number of a row is when its reference moves: float16 has 2^-14 and 2^15 around it."""
LIMIT = gl.constexpr(15.0)
"""log2 of what none may exceed."""
GREATEST = gl.constexpr("redux.sync.max.s32 $0, $1, 0xffffffff;")


@gluon.constexpr_function
def everyone_layout(warps):
    """Of [warps, 1]: every thread has the numbers of all warps."""
    return gl.DistributedLinearLayout(
        [[1 << bit, 0] for bit in range(bits(warps))], [[0, 0]] * 5, [[0, 0]] * bits(warps), [], [warps, 1]
    )


@gluon.jit
def greatest_of_warp(x):
    """The greatest number >= 0 of a warp whose threads have one each, in all of them."""
    bits = x.to(gl.int32, bitcast=True)
    greatest = gl.inline_asm_elementwise(GREATEST, "=r,r", [bits], dtype=gl.int32, is_pure=False, pack=1)
    return greatest.to(gl.float32, bitcast=True)


@gluon.jit
def announce(scores, magnitudes, flags):
    """Tell all warps the greatest height that this one has, of scores [keys, rows] plus the magnitudes [keys] of what
    their probabilities are multiplied with, by flags: memory [warps, 32]."""
    W: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = scores.shape[0] // (16 * W)
    ROWS: gl.constexpr = scores.shape[1]
    # part of the keys | warp | + 8 | lane / 4 | row / 8 | lane % 4 | pair
    x = gl.reshape(scores, [PARTS, W, 2, 8, ROWS // 8, 4, 2])
    x = gl.max(gl.max(x, 6), 4)
    magnitudes = gl.reshape(magnitudes, [PARTS, W, 2, 8])
    x += gl.convert_layout(magnitudes, gl.SliceLayout(4, x.type.layout), assert_trivial=True)[:, :, :, :, None]
    # [W, 8, 4], of every thread its own
    x = gl.maximum(gl.max(gl.max(x, 2), 0), 0.0)
    flags.store(gl.reshape(greatest_of_warp(x), [W, 32]))


@gluon.jit
def any_above(flags):
    """Whether any warp has announced a number above LIMIT."""
    found = flags.slice(0, 1, dim=1).load(everyone_layout(gl.num_warps()))
    return gl.max(found, 0).item() > LIMIT


@gluon.jit
def thread_sums(p):
    """[parts, 8, rows]: of p [keys, rows] what a thread adds up without asking another one."""
    KEYS: gl.constexpr = p.shape[0]
    ROWS: gl.constexpr = p.shape[1]
    return gl.sum(gl.reshape(p, [KEYS // 16, 2, 8, ROWS]), 1)


@gluon.jit
def raised(heights, references, sums, acc, first):
    """(references [rows], sums, acc, [rows] how far the references have moved): so far that the largest of heights
    [keys, rows] is HEIGHT, down only in the first tile of a share."""
    move = gl.max(heights, 0) - HEIGHT
    move = gl.where(move == float("-inf"), 0.0, move)  # of a row that sees no key
    if not first:
        move = gl.maximum(move, 0.0)
    # nothing was accumulated before the first tile: a factor above 1 has nothing to multiply, and may be infinite
    factor = gl.exp2(0.0 - gl.maximum(move, 0.0))
    per_sum = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout)))
    return references + move, sums * per_sum[None, None, :], acc * factor[None, :], move
