"""The running maxima of rows, and by how much their scores are scaled, for scores of any size, in Gluon.

A probability is 2^(score * scale - maximum), product and difference in one instruction, while the maximum is a product
that was rounded before. That is the same factor for all keys of a row, and cancels, as long as no exponent overflows: a
maximum of 2^27 is rounded by up to 4. Rows with greater ones are scaled by a power of two, so that their maxima are
exact. Two scores of float32 that differ are then 8 or more apart. The power of two at or above the scale makes it up to
twice as much: what was 2^-8 of the greatest probability or less is less still.

A maximum is raised only where it is 2^8 too small. A warp whose rows need no raise passes over all that a raise takes:
it only compares, each thread the scores that it has.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.rows import broadcast_rows, by_thread, extreme_asm, of_threads, thread_sum
from blocktune.kernels.hopper.common.sinks import log2_with_sink, sum_with_sink


@gluon.jit
def scales_of(scale):
    """Return (scale, the power of two at or above it), of a scale above zero."""
    bits = scale.to(gl.int32, bitcast=True)
    return scale, ((bits + 0x7FFFFF) & -0x800000).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def raise_asm(count, apart, natural):
    """Return assembly for the `count` scores of a thread, two of row r and two of row r + 8 in turns: `raised_top`,
    skipped by a warp that has nothing to raise. Operands, `count` of each: maxima, scales and factors as results, and
    bases if the scores stand apart; maxima, scales, scores and both scales of `scales_of` as arguments, and distances
    if they do. Of what belongs to rows those at the places 0 and 2 count.

    Scores are compared as integers, which the hardware does three at a time, and with zero: above zero the order is
    that of the numbers, and below it is enough that they are below, unless the maximum is low as well. Then zero itself
    fails the test, and what is skipped otherwise begins with the maximum of the numbers.

    natural: the scale of great scores is one, below the usual one. What was added up by another scale is e^-8 of the
    new sums or less, below the rounding of such scores: its factor is 0, where the difference of the maxima would give
    any.
    """
    scales, factors = count, 2 * count
    bases = 3 * count if apart else 0  # of scores that do not stand apart a base is the maximum
    old, old_scales, scores, own, above, distances = (place * count for place in range(3 + apart, 9 + apart))
    limit = "0f41000000"  # 8
    head = ["{", ".reg .pred p, q, r, fits;", f".reg .s32 s<{count}>, top, topb;"]
    head += [".reg .f32 high, highb, low, over, scale, size;"]
    head += [f"mov.b32 s{i}, ${scores + i};" for i in range(count)]
    body = []
    for row in range(2):
        at, mine = 2 * row, [i for i in range(count) if i % 4 // 2 == row]
        exceeds = [f"neg.f32 low, ${bases + at};", f"fma.rn.f32 over, high, ${scales + at}, low;"]
        head += [f"mov.f32 ${at}, ${old + at};", f"mov.f32 ${scales + at}, ${old_scales + at};"]
        if apart:
            head += [f"fma.rn.f32 ${bases + at}, ${distances + at}, ${old_scales + at}, ${old + at};"]
        head += [f"mov.f32 ${factors + at}, 0f3F800000;", *extreme_asm("max.s32", "top", [f"s{i}" for i in mine])]
        head += ["max.s32 top, top, 0;", "mov.b32 high, top;", *exceeds, f"setp.gt.f32 {'pq'[row]}, over, {limit};"]
        body += extreme_asm("max.f32", "high", [f"${scores + i}" for i in mine])
        for lanes in (2, 1):
            body += [f"shfl.sync.bfly.b32 highb, high, {lanes}, 0x1f, 0xffffffff;", "max.f32 high, high, highb;"]
        body += [*exceeds, f"setp.gt.f32 r, over, {limit};"]
        body += [f"mul.f32 size, high, ${own};", "abs.f32 size, size;", "setp.lt.f32 fits, size, 0f4D000000;"]  # 2^27
        body += [f"selp.f32 scale, ${own}, ${above}, fits;", "mul.f32 high, high, scale;"]
        if apart:
            body += [f"@r mov.f32 ${bases + at}, high;", f"neg.f32 low, ${distances + at};"]
            body += ["fma.rn.f32 high, low, scale, high;"]
        body += [f"sub.f32 over, ${at}, high;", "ex2.approx.ftz.f32 over, over;", f"@r mov.f32 ${at}, high;"]
        if natural:
            body += [f"setp.neu.f32 fits, scale, ${old_scales + at};", "@fits mov.f32 over, 0f00000000;"]
        body += [f"@r mov.f32 ${scales + at}, scale;", f"@r mov.f32 ${factors + at}, over;"]
    head += ["or.pred p, p, q;", "vote.sync.any.pred p, p, 0xffffffff;", "@!p bra SKIP;"]
    return "\n".join([*head, *body, "SKIP:", "}"])


@gluon.constexpr_function
def raise_constraints(count, apart):
    """Return the constraints of `raise_asm`."""
    return ",".join(["=&f"] * (3 + apart) * count + ["f"] * (5 + apart) * count)


@gluon.jit
def raised_top(s, top, scales, distance=None, NATURAL: gl.constexpr = False):
    """Return ((maximum, scale), base, factor) of the rows, [64, 4] each, after a further block of scores [64, N / 8, 4,
    2], which are scaled here. What was added up before has to be multiplied by the factor: 1 unless the maximum was
    raised. base: what exponents of this block are relative to, the maximum and the `distance` of the scores, if they
    have one."""
    COUNT: gl.constexpr = s.shape[1] * 4
    APART: gl.constexpr = distance is not None
    ASM: gl.constexpr = raise_asm(COUNT, APART, NATURAL)
    CONSTRAINTS: gl.constexpr = raise_constraints(COUNT, APART)
    maximum, scale = top
    own, above = scales
    if APART:
        old = broadcast_rows(maximum, s), broadcast_rows(scale, s)
        maximum, scale, factor, base = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [old[0], old[1], s, own, above, broadcast_rows(distance, s)],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=COUNT,
        )  # fmt: skip
        return (of_threads(maximum), of_threads(scale)), of_threads(base), of_threads(factor)
    else:
        maximum, scale, factor = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [broadcast_rows(maximum, s), broadcast_rows(scale, s), s, own, above],
            dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=COUNT,
        )  # fmt: skip
        maximum = of_threads(maximum)
        return (maximum, of_threads(scale)), maximum, of_threads(factor)


@gluon.jit
def of_scaled_scores(s, scale, maximum):
    """Compute 2^(s * scale - maximum)."""
    return gl.exp2(s * scale - maximum)


@gluon.jit
def softmax(qk, top, scales, S_L: gl.constexpr, distance=None, NATURAL: gl.constexpr = False):
    """Return the probabilities of a block of scores [64, BLOCK_N], which are scaled here, the rows' maximum and scale,
    the factor of what was added up before, and the probabilities' sums [64, 4]. distance: what the scores of a row [64,
    4] are too high by. NATURAL: scores and scales are those of an additive mask (`raise_asm`)."""
    # [64, BLOCK_N / 8, 4, 2]
    s = by_thread(qk)
    top, base, factor = raised_top(s, top, scales, distance, NATURAL)
    _, scale = top
    p = of_scaled_scores(s, broadcast_rows(scale, s), broadcast_rows(base, s))
    return gl.convert_layout(gl.reshape(p, qk.shape), S_L), top, factor, thread_sum(p)


@gluon.jit
def first_softmax(qk, no_acc, scales, S_L: gl.constexpr, distance=None):
    """Compute `softmax` of a row's first block, with factors of 1. no_acc: zeros like the scores.

    The maximum is finite where there is none: infinities in the keys, or keys that it does not see, leave scores of
    -inf alone, and -inf minus -inf would be NaN. All later maxima are then finite too.
    """
    LOWEST: gl.constexpr = -3.4028234663852886e38
    own, _ = scales
    # [64, 4]
    nothing = thread_sum(by_thread(no_acc))
    p, top, _, sums = softmax(qk, (nothing + LOWEST, nothing + own), scales, S_L, distance)
    return p, top, nothing + 1.0, sums


@gluon.jit
def row_maxima(top, scales, ROW_S: gl.constexpr):
    """Return the maxima [64] of rows that probabilities are relative to, in units of log2 and of the scale of all
    rows."""
    maximum, scale = top
    own, _ = scales
    return gl.convert_layout(gl.max(maximum * (own / scale), 1), ROW_S)


@gluon.jit
def row_sums(sums, top, sink, scales, ROW_S: gl.constexpr):
    """Return the sums [64] of the probabilities of rows, of [64, 4]; with a sink as `sum_with_sink` has them."""
    # [64]
    total = gl.convert_layout(gl.sum(sums, 1), ROW_S)
    if sink is not None:
        total = sum_with_sink(total, row_maxima(top, scales, ROW_S), sink)
    return total


@gluon.jit
def log_sum_exp(top, total, sink, scales, ROW_S: gl.constexpr, ADDITIVE: gl.constexpr = False):
    """Return the log-sum-exp [64] in natural units of the rows with these `row_sums`. ADDITIVE: that of a masked row is
    as kernels/portable/forward/masked_rows.py has it."""
    LN_2: gl.constexpr = 0.6931471805599453
    # [64]
    log2_sum = row_maxima(top, scales, ROW_S) + gl.log2(total)
    if sink is not None:
        log2_sum = log2_with_sink(log2_sum, total, sink)
    lse = log2_sum * LN_2
    if ADDITIVE:
        code = (gl.log2(total) + 1.0) * 0.000244140625 - 2.0
        lse = gl.where(log2_sum < -5e14, code * 1.7014118346046923e38, lse)
    return lse
