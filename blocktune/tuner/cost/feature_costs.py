"""The costs of features in a forward, and typical lengths for shapes that name the longest."""

import math
from dataclasses import dataclass, replace
from typing import Self

from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import AttentionShape, Direction

SHORTEST = 0.5
"""Of the longest length, what packed sequences and caches have at least where shapes are tuned and measured: the others
are drawn evenly from there on (tuner/correctness/inputs.py)."""
MEAN_LENGTH = (1 + SHORTEST) / 2
MEAN_SQUARE = (1 + SHORTEST + SHORTEST**2) / 3

DROPOUT_INSTRUCTIONS = 24.0
"""Of every score: a quarter of the rounds of Philox, a comparison and a selection. Fitted to an H200."""
SOFTCAP_INSTRUCTIONS = 3.0
"""Of every score, in addition to the hyperbolic tangent, which the units of exponentials compute."""
MASK_TENSOR_INSTRUCTIONS = {MaskKind.BOOLEAN: 2.0, MaskKind.ADDITIVE: 5.0}
"""Of every score: its place in the mask, and what the mask does to it. Fitted to an H200."""


@dataclass(frozen=True, slots=True)
class FeatureCosts:
    """The additions to every score: further exponentials, further instructions, and bytes of a mask."""

    exponentials: int = 0
    instructions: float = 0.0
    mask_bytes: int = 0

    @classmethod
    def of(cls, features: Features, element_bytes: int) -> Self:
        """Return the costs of the features of a shape."""
        instructions = MASK_TENSOR_INSTRUCTIONS.get(features.mask, 0.0)
        instructions += DROPOUT_INSTRUCTIONS * features.dropout + SOFTCAP_INSTRUCTIONS * features.softcap
        loaded = {MaskKind.BOOLEAN: 1, MaskKind.ADDITIVE: element_bytes}.get(features.mask, 0)
        return cls(int(features.softcap), instructions, loaded)


def typical_lengths(shape: AttentionShape) -> AttentionShape:
    """Return a forward whose sequences are as long as those of its packed sequences or caches are on average, where a
    shape names the longest: for packed ones so that they have as many pairs of queries and keys."""
    features = shape.features
    if shape.direction is not Direction.FORWARD or not (features.varlen or features.cached):
        return shape
    others = shape.batch - 1
    if features.varlen:
        share = math.sqrt((1 + others * MEAN_SQUARE) / shape.batch)
        return replace(shape, seqlen_q=_part(shape.seqlen_q, share), seqlen_k=_part(shape.seqlen_k, share))
    return replace(shape, seqlen_k=max(shape.seqlen_q, _part(shape.seqlen_k, (1 + others * MEAN_LENGTH) / shape.batch)))


def _part(length: int, share: float) -> int:
    return max(1, round(share * length))
