"""Rows that an additive mask hides with finite numbers: device functions that forward and backward share.

Padding rows often hold the least finite number everywhere. Float32 keeps no score next to such a number, so the row's
visible keys have equal probabilities, 1 / n each. It keeps log(n) next to it neither: a backward that computes
exp(score - lse) would find 1.

A finite number of a mask below -2^21 therefore counts as -2^50 (`bounded_mask`), in a row of such numbers as well as
next to others, where its key is hidden either way. Float32 steps by 1/8 below -2^20, so nothing is lost that a score
could tell. The log-sum-exp of such a row is near the least number of float32, in steps that say log2(n) (`log_sum_exp`,
`log2_keys`).
"""

import triton
import triton.language as tl

# No module-level tl.constexpr: see kernels/portable/forward/tiles.py.


@triton.jit
def bounded_mask(values):
    """Return an additive mask, float32, with -2^50 in the place of finite numbers below -2^21."""
    low = (values < -2097152.0) & (values > float("-inf"))
    return tl.where(low, -1125899906842624.0, values)


@triton.jit
def log_sum_exp(m_i, l_i):
    """Return the natural log-sum-exp of rows with maxima m_i in base 2 and sums l_i above 0.

    Of a row whose keys all count as -2^50 it is -2^127 (2 - (1 + log2(l_i)) / 4096), within 1 % of the least number of
    float32, and greater with more keys.
    """
    ln_2: tl.constexpr = 0.6931471805599453
    log2_sum = tl.log2(l_i)
    code = (log2_sum + 1.0) * 0.000244140625 - 2.0
    return tl.where(m_i < -5e14, code * 1.7014118346046923e38, m_i * ln_2 + log2_sum * ln_2)


@triton.jit
def is_masked_row(lse):
    """Return whether a log-sum-exp is one of rows whose keys all count as -2^50."""
    return (lse < -1e38) & (lse > float("-inf"))


@triton.jit
def log2_keys(lse):
    """Return log2 of the sum that `log_sum_exp` made the number of a masked row from."""
    halves = lse * 5.421010862427522e-20 * 1.0842021724855044e-19  # 2^-64 and 2^-63: 2^-127 is subnormal
    return (halves + 2.0) * 4096.0 - 1.0
