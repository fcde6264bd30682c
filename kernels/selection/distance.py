"""How much two shapes differ, in doublings of a length."""

from math import log2

from blocktune.kernels.values.shape import AttentionShape, Causal


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
