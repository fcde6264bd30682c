"""The running maximum of rows in the 8-bit Hopper forward: device functions of kernels/hopper/fp8/steps.py.

Numbers of rows stand as [64, 4] (kernels/hopper/common/rows.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.rows import broadcast_rows, extreme_asm, of_threads


@gluon.constexpr_function
def raise_asm(count, shift, tau):
    """Return assembly for the `count` scores of a thread, two of row r and two of row r + 8 in turns: `raised`, skipped
    by a warp that has nothing to raise. Operands: bases and factors as results, bases, scores and their scale as
    arguments, `count` of each; of what belongs to rows those at the places 0 and 2 count.

    Scores are compared as integers, which the hardware does three at a time, and with zero: above zero the order is
    that of the numbers, and below it is enough that they are below, unless the base is low as well. Then zero itself
    fails the test, and what is skipped otherwise finds the maximum of numbers that are not positive: the least of them
    as unsigned integers.
    """
    bases, scores, scale, limit = 2 * count, 3 * count, f"${4 * count}", float(shift + tau)
    head = ["{", ".reg .pred p, q, r;", f".reg .b32 s<{count}>, top0, top1, top0b, top1b, least, leastb;"]
    head += [".reg .f32 high, highb, low, above;", *(f"mov.b32 s{i}, ${scores + i};" for i in range(count))]
    body = []
    for row in range(2):
        at, top, mine = 2 * row, f"top{row}", [f"s{i}" for i in range(count) if i % 4 // 2 == row]
        head += [f"mov.f32 ${at}, ${bases + at};", f"mov.f32 ${count + at}, 0f3F800000;"]
        head += extreme_asm("max.s32", top, mine)
        head += [f"max.s32 {top}, {top}, 0;", f"mov.b32 high, {top};", f"neg.f32 low, ${at};"]
        head += [f"fma.rn.f32 above, high, {scale}, low;", f"setp.gt.f32 {'pq'[row]}, above, {limit};"]
        body += [*extreme_asm("min.u32", "least", mine), f"setp.gt.s32 r, {top}, 0;"]
        body += [f"selp.b32 least, {top}, least, r;", "mov.b32 high, least;"]
        for lanes in (2, 1):
            body += [f"shfl.sync.bfly.b32 highb, high, {lanes}, 0x1f, 0xffffffff;", "max.f32 high, high, highb;"]
        body += [f"neg.f32 low, ${at};", f"fma.rn.f32 above, high, {scale}, low;", f"setp.gt.f32 r, above, {limit};"]
        body += [f"sub.f32 above, {float(shift)}, above;", "ex2.approx.ftz.f32 above, above;"]
        body += [f"@r fma.rn.f32 ${at}, high, {scale}, {float(-shift)};", f"@r mov.f32 ${count + at}, above;"]
    head += ["or.pred p, p, q;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra SKIP;"]
    return "\n".join([*head, *body, "SKIP:", "}"])


@gluon.constexpr_function
def raise_constraints(count):
    """Return the constraints of `raise_asm`."""
    return ",".join(["=&f"] * 2 * count + ["f"] * 3 * count)


@gluon.jit
def raised(base, s, scale):
    """Return what is subtracted from the scaled scores of rows [64, 4] from this block of keys on, and the factor of
    what was summed up before.

    s: the block's scores, which are scaled here. A base is SHIFT less than the running maximum when it was raised, and
    the maximum may have grown by TAU before it is raised again. So most warps only compare: they exchange no numbers,
    and no exponential waits for an exchange.
    """
    SHIFT: gl.constexpr = 4
    TAU: gl.constexpr = 4
    COUNT: gl.constexpr = s.shape[1] * 4
    ASM: gl.constexpr = raise_asm(COUNT, SHIFT, TAU)
    CONSTRAINTS: gl.constexpr = raise_constraints(COUNT)
    # [64, N / 8, 4, 2]
    base, factor = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [broadcast_rows(base, s), s, scale], dtype=(gl.float32, gl.float32), is_pure=False, pack=COUNT
    )
    return of_threads(base), of_threads(factor)
