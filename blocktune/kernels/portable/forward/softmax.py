"""The softmax recurrences of the forward kernels, in base 2: device functions.

Scores are multiplied by scale * log2(e), so that exp2 replaces exp (FlashAttention-2, arXiv 2307.08691, section 3.1).

- `online_step` raises the running maximum with every tile and rescales what was accumulated.
- `fixed_step` keeps the maximum of the first tile as the reference of all later ones: no maximum is taken and nothing
  is rescaled (the unified maximum of FlashDecoding++, arXiv 2311.01282, section 3). Its exponents may exceed zero.
- `exact_step` subtracts the maximum before it scales, which costs one more instruction per score. The caller checks
  `is_sound` and `is_exact` after the other two, and computes the rows again with this one where either says no.
"""

import triton
import triton.language as tl


@triton.jit
def no_maximum(BLOCK: tl.constexpr):
    """Return the maxima [BLOCK] of rows that have seen no key: below all scores, and finite. A whole tile may have
    scores of -inf, from infinities in its keys, and -inf minus -inf would be NaN."""
    return tl.full([BLOCK], -3.4028234663852886e38, tl.float32)


@triton.jit
def online_step(scores, m_i, l_i, scale_log2, MASKED: tl.constexpr):
    """Take one tile of the online softmax.

    scores [BLOCK_M, BLOCK_N] are unscaled, a masked one is -inf; m_i and l_i [BLOCK_M] are the running maximum (scaled)
    and sum. Return the probabilities, the new maximum, the new sum and the factor [BLOCK_M] for what was accumulated.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1) * scale_log2)
    if MASKED:
        # a row that has seen no key keeps -inf as its maximum, and -inf minus -inf would be NaN
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        reference = m_new
    p = tl.exp2(scores * scale_log2 - reference[:, None])
    factor = tl.exp2(m_i - reference)
    return p, m_new, l_i * factor + tl.sum(p, 1), factor


@triton.jit
def exact_step(scores, m_i, l_i, scale_log2):
    """Do what `online_step` does for scores of any size: the maximum m_i [BLOCK_M], which is unscaled here, has the
    exponent 0."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    p = tl.exp2((scores - m_new[:, None]) * scale_log2)
    factor = tl.exp2((m_i - m_new) * scale_log2)
    return p, m_new, l_i * factor + tl.sum(p, 1), factor


@triton.jit
def fixed_step(scores, reference, l_i, scale_log2):
    """Return the probabilities [BLOCK_M, BLOCK_N] of a tile against a fixed reference [BLOCK_M], and the new row
    sums."""
    p = tl.exp2(scores * scale_log2 - reference[:, None])
    return p, l_i + tl.sum(p, 1)


@triton.jit
def is_sound(l_i, acc):
    """Return whether the sums of `fixed_step` can be trusted: a scalar.

    The reference is one of each row's own scores, so a sum is at least 1 and nothing is lost below. Overflow above, of
    a probability in float32 or on its way to the data type of the second product, leaves a row sum l_i [BLOCK_M] or an
    accumulator acc [BLOCK_M, HEAD_DIM_V] that is not finite.
    """
    finite_sums = tl.min((l_i < float("inf")).to(tl.int32), 0)
    finite_acc = tl.min(tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1), 0)
    return (finite_sums & finite_acc) == 1


@triton.jit
def is_exact(m_i):
    """Return whether exponents against the maxima m_i [BLOCK_M] of `online_step` can be trusted: a scalar.

    A product and a difference are one instruction, whose result is exact, but the maximum was rounded by 2^-24 of
    itself: from 2^22 on by a quarter, and soon by more than any exponent holds. Rows that saw no key do not count.
    """
    too_large = (tl.abs(m_i) >= 4194304.0) & (m_i > -3.4028234663852886e38)
    return tl.max(too_large.to(tl.int32), 0) == 0
