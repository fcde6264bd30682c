"""The maxima of rows, and by how much their scores are scaled, for scores of any size, in Gluon.

A probability is 2^(score * scale - maximum), product and difference in one instruction, while the maximum is a product
that was rounded before. That is the same factor for all keys of a row, and cancels, as long as no exponent overflows: a
maximum of 2^27 is rounded by up to 4. The maxima of greater ones are scaled by a power of two, and so exact. Between
two scores of float32 that differ, and are that great, are 8 or more then; the power of two at or above the scale
makes it up to twice as many: what was 2^-8 of the greatest probability or less is less still.
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
def is_exact(maximum):
    """Whether a maximum is scaled by the scale itself, and not by the power of two above it."""
    LARGE: gl.constexpr = 134217728.0
    return gl.abs(maximum) < LARGE


@gluon.jit
def scaled_maximum(qk, scales, ROW_S: gl.constexpr):
    """The maximum [64] of each row of products [64, BLOCK_N], scaled."""
    own, above = scales
    highest = row_max(qk, ROW_S)
    product = highest * own
    return gl.where(is_exact(product), product, highest * above)


@gluon.jit
def first_maximum(qk, scales, ROW_S: gl.constexpr):
    """The maximum of a row's first block, finite where there is none: infinities in the keys, or keys that it does not
    see, leave scores of -inf alone, and -inf minus -inf would be NaN. All later maxima are then finite too."""
    LOWEST: gl.constexpr = -3.4028234663852886e38
    return gl.maximum(scaled_maximum(qk, scales, ROW_S), LOWEST)


@gluon.jit
def probabilities(qk, maximum, scales):
    """2^(scaled product - maximum) [64, BLOCK_N]."""
    own, above = scales
    # [64]
    scale = gl.where(is_exact(maximum), own, above)
    return gl.exp2(qk * scale[:, None] - maximum[:, None])


@gluon.jit
def log_sum_exp(maximum, total, scales):
    """The log-sum-exp [64] in natural units of the rows whose probabilities have the sum `total`."""
    LN_2: gl.constexpr = 0.6931471805599453
    own, above = scales
    return (gl.where(is_exact(maximum), maximum, maximum * (own / above)) + gl.log2(total)) * LN_2
