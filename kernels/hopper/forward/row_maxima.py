"""The running maxima of rows, and by how much their scores are scaled, for scores of any size, in Gluon.

A probability is 2^(score * scale - maximum), product and difference in one instruction, while the maximum is a product
that was rounded before. That is the same factor for all keys of a row, and cancels, as long as no exponent overflows: a
maximum of 2^27 is rounded by up to 4. Rows with greater ones are scaled by a power of two, so that their maxima are
exact. Two scores of float32 that differ are then 8 or more apart. The power of two at or above the scale makes it up to
twice as much: what was 2^-8 of the greatest probability or less is less still.

A maximum is raised only where it is 2^8 too small (warps.py), and a warp whose rows need no raise passes over all that
a raise takes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.common.device_functions import row_max


@gluon.jit
def scales_of(scale):
    """(scale, the power of two at or above it), of a scale above zero."""
    bits = scale.to(gl.int32, bitcast=True)
    return scale, ((bits + 0x7FFFFF) & -0x800000).to(gl.float32, bitcast=True)


@gluon.jit
def first_top(qk, scales, ROW_S: gl.constexpr):
    """(maximum, scale) of each row [64] from its first block of products [64, BLOCK_N].

    The maximum is finite where there is none: infinities in the keys, or keys that it does not see, leave scores of
    -inf alone, and -inf minus -inf would be NaN. All later maxima are then finite too.
    """
    LOWEST: gl.constexpr = -3.4028234663852886e38
    LARGE: gl.constexpr = 134217728.0
    own, above = scales
    highest = row_max(qk, ROW_S)
    scale = gl.where(gl.abs(highest * own) < LARGE, own, above)
    return gl.maximum(highest * scale, LOWEST), scale


@gluon.constexpr_function
def raise_asm():
    """Assembly for the two rows of a thread: outputs 0, 2, 4 and 1, 3, 5 are the new maximum, scale and factor, and
    operands 6 and 7 the highest products; 8 .. 11 are the outputs' values before, 12 and 14 the scales."""

    def row(i, p):
        maximum, scale, factor, highest = f"${i}", f"${2 + i}", f"${4 + i}", f"${6 + i}"
        return [
            f"mul.f32 x, {highest}, $12;",
            "abs.f32 y, x;",
            "setp.lt.f32 r, y, 0f4D000000;",  # 2^27
            "selp.f32 y, $12, $14, r;",
            f"mul.f32 x, {highest}, y;",
            f"sub.f32 z, {maximum}, x;",
            "ex2.approx.ftz.f32 z, z;",
            f"@{p} mov.f32 {maximum}, x;",
            f"@{p} mov.f32 {scale}, y;",
            f"@{p} mov.f32 {factor}, z;",
        ]

    lines = ["{", ".reg .pred p, q, r, s;", ".reg .f32 x, y, z, u, v;"]
    lines += ["neg.f32 u, $8;", "fma.rn.f32 u, $6, $10, u;", "neg.f32 v, $9;", "fma.rn.f32 v, $7, $11, v;"]
    lines += ["mov.f32 $4, 0f3F800000;", "mov.f32 $5, 0f3F800000;"]
    lines += ["setp.gt.f32 p, u, 0f41000000;", "setp.gt.f32 q, v, 0f41000000;"]  # 8
    lines += ["or.pred s, p, q;", "vote.sync.any.pred s, s, 0xffffffff;", "@!s bra SKIP;"]
    return "\n".join([*lines, *row(0, "p"), *row(1, "q"), "SKIP:", "}"])


@gluon.jit
def raised(qk, top, scales, ROW_S: gl.constexpr):
    """((maximum, scale), factor) of each row after a further block of products: raised if the maximum was 2^8 too
    small. What was added up before has to be multiplied by the factor, which is 1 otherwise."""
    ASM: gl.constexpr = raise_asm()
    maximum, scale = top
    own, above = scales
    maximum, scale, factor = gl.inline_asm_elementwise(
        ASM, "=&f,=&f,=&f,=&f,=&f,=&f,f,f,0,1,2,3,f,f,f,f", [row_max(qk, ROW_S), maximum, scale, own, above],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip
    return (maximum, scale), factor


@gluon.jit
def probabilities(qk, top):
    """2^(scaled product - maximum) [64, BLOCK_N]."""
    maximum, scale = top
    return gl.exp2(qk * scale[:, None] - maximum[:, None])


@gluon.jit
def log_sum_exp(top, total, scales):
    """The log-sum-exp [64] in natural units of the rows whose probabilities have the sum `total`."""
    LN_2: gl.constexpr = 0.6931471805599453
    maximum, scale = top
    own, _ = scales
    return (maximum * (own / scale) + gl.log2(total)) * LN_2
