"""How near two shapes are, and which shape is decided for in place of many near ones."""

from dataclasses import replace
from math import log2

from blocktune.kernels.values.shape import AttentionShape, Causal

KEY_BITS = 4
"""Leading bits of the number of keys that a decision depends on, the first of which is 1."""


def distance(a: AttentionShape, b: AttentionShape) -> float:
    """Return how much two shapes of a kind differ: doublings of their lengths, plus what the other differences weigh.

    A causal mask counts as three doublings since it halves the work and unbalances the blocks.
    """
    masks = 3.0 if (a.causal is Causal.NONE) is not (b.causal is Causal.NONE) else 0.5 * (a.causal is not b.causal)
    return distance_but_masks(a, b) + masks


def distance_but_masks(a: AttentionShape, b: AttentionShape) -> float:
    """Return the same for shapes of equal masks: the number of (batch, head) pairs only decides how full the last wave
    is."""
    lengths = abs(log2(a.seqlen_q / b.seqlen_q)) + abs(log2(a.seqlen_k / b.seqlen_k))
    waves = abs(log2(a.batch * a.num_heads / (b.batch * b.num_heads))) / 4
    groups = abs(log2(a.group_size / b.group_size)) / 2
    return lengths + waves + groups + 0.25 * (a.dtype != b.dtype)


def representative(shape: AttentionShape) -> AttentionShape:
    """Return the shape that is decided for in place of one with more keys than queries: its keys are rounded up to
    `KEY_BITS` leading bits. A model that decodes comes with one more key by every token, and eight decisions last it
    until it has twice as many."""
    keys = shape.seqlen_k
    if keys <= shape.seqlen_q or keys.bit_length() <= KEY_BITS:
        return shape
    step = 1 << (keys.bit_length() - KEY_BITS)
    return replace(shape, seqlen_k=-(-keys // step) * step)
