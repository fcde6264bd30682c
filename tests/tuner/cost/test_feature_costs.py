"""What features add to a predicted time, and the lengths that a shape of several stands for."""

from dataclasses import replace

import pytest

from blocktune.kernels.values.features import Features, MaskKind
from blocktune.kernels.values.shape import Direction
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cost.feature_costs import FeatureCosts, typical_lengths

SHAPE = complete_shape(4096, 128, batch=4, heads=8)


def test_each_feature_costs_what_it_computes_or_loads() -> None:
    assert FeatureCosts.of(Features(), 2) == FeatureCosts()
    assert FeatureCosts.of(Features(softcap=True), 2).exponentials == 1
    assert FeatureCosts.of(Features(dropout=True), 2).instructions > 10
    assert FeatureCosts.of(Features(mask=MaskKind.ADDITIVE), 4).mask_bytes == 4
    assert FeatureCosts.of(Features(mask=MaskKind.BOOLEAN), 4).mask_bytes == 1


def test_packed_and_cached_forwards_count_usual_lengths() -> None:
    packed, cached = (replace(SHAPE, features=Features(**{name: True})) for name in ("varlen", "cached"))
    assert typical_lengths(SHAPE) == SHAPE
    pairs = typical_lengths(packed).seqlen_q * typical_lengths(packed).seqlen_k
    assert pairs / 4096**2 == pytest.approx((1 + 3 * 7 / 12) / 4, rel=1e-3)
    assert typical_lengths(replace(cached, seqlen_q=1)).seqlen_k == round(4096 * (1 + 3 * 0.75) / 4)
    backward = replace(packed, direction=Direction.BACKWARD)
    assert typical_lengths(backward) == backward
