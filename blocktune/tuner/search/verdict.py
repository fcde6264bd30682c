"""Who won the finals, and whether by more than the noise."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blocktune.db.records.records import Objective
from blocktune.kernels.values.config import KernelConfig

TIE_BAND = 0.005
"""Finalists within half a percent of the fastest are equal: repeated finals on one GPU differ by about as much, and a
fixed order among equals makes the winner repeatable."""

CONFIDENCE = 0.99
"""Of the interval that must exclude 1 before a config replaces the default. Higher than usual, since the challenger is
the best of several."""

PREDICTED_TIE = 0.02
"""Predictions this close say nothing about who is faster: the model is off by more (docs/models/search.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The default's time over a config's, paired by round.

    median, low and high: median, 5th and 95th percentile of the rounds' ratios. surely: the lower end of the confidence
    interval of the median.
    """

    median: float
    low: float
    high: float
    surely: float

    @property
    def beyond_noise(self) -> bool:
        """Whether it is a speed-up at all: more than the tie band, and surely more than none."""
        return self.surely > 1.0 and self.median > 1.0 + TIE_BAND

    @property
    def label(self) -> str:
        return f"{self.median:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner and why. speedup is over the default, of what was compared, and None when the default was not in the
    finals."""

    winner: KernelConfig
    reason: str
    speedup: Speedup | None


def decide(
    samples: Mapping[KernelConfig, Sequence[float]],
    default: KernelConfig,
    order: Sequence[KernelConfig],
    objective: Objective = Objective.TIME,
) -> Verdict:
    """Return the winner of paired rounds.

    Args:
        samples: times, or energies: at least one finalist with at least one round; entries of equal index are one
            round.
        default: wins unless another finalist is better beyond the noise.
        order: the fixed order of equals; configs missing from it come last.
        objective: what the samples are of.
    """
    better, best = _WORDS[objective]
    challenger = _first_of_equals(samples, order)
    if default not in samples:
        return Verdict(winner=challenger, reason="the default does not run here", speedup=None)
    if challenger == default:
        return Verdict(winner=default, reason=f"the default is {best}", speedup=_UNITY)
    gain = speedup(samples[default], samples[challenger])
    if gain.beyond_noise:
        return Verdict(winner=challenger, reason=f"{better} than the default: {gain.label}", speedup=gain)
    reason = (
        f"no config is {better} than the default beyond the noise; the best one, {challenger.label}, is {gain.label}"
    )
    return Verdict(winner=default, reason=reason, speedup=_UNITY)


def speedup(reference_us: Sequence[float], candidate_us: Sequence[float]) -> Speedup:
    """Return how much faster the candidate is than the reference, from paired rounds."""
    ratios = sorted(a / b for a, b in zip(reference_us, candidate_us, strict=True))
    return Speedup(
        median=statistics.median(ratios),
        low=_quantile(ratios, 0.05),
        high=_quantile(ratios, 0.95),
        surely=median_interval(ratios)[0],
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the confidence interval of the median by order statistics, exact for any distribution.

    With too few values for the confidence it is everything.
    """
    ordered = sorted(values)
    count = len(ordered)
    below, tail = -1, 0.0
    while tail + math.comb(count, below + 1) / 2**count <= (1 - CONFIDENCE) / 2:
        below += 1
        tail += math.comb(count, below) / 2**count
    if below < 0:
        return -math.inf, math.inf
    return ordered[below], ordered[count - 1 - below]


_WORDS = {Objective.TIME: ("faster", "the fastest"), Objective.ENERGY: ("more frugal", "the most frugal")}
_UNITY = Speedup(median=1.0, low=1.0, high=1.0, surely=1.0)


def _first_of_equals(samples_us: Mapping[KernelConfig, Sequence[float]], order: Sequence[KernelConfig]) -> KernelConfig:
    """Return the first in `order` of the finalists within the tie band of the fastest."""
    fastest = min(samples_us, key=lambda config: statistics.median(samples_us[config]))
    rank = {config: index for index, config in enumerate(order)}
    equals = [
        config for config, times in samples_us.items() if speedup(times, samples_us[fastest]).median <= 1.0 + TIE_BAND
    ]
    return min(equals, key=lambda config: rank.get(config, len(rank)))


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return the nearest-rank quantile of ascending values."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def decide_predicted(predicted_us: Mapping[KernelConfig, float], default: KernelConfig) -> KernelConfig:
    """Return the winner of predictions: the fastest, but the default where it is as good."""
    fastest = min(predicted_us, key=lambda config: predicted_us[config])
    is_tie = default in predicted_us and predicted_us[default] <= (1 + PREDICTED_TIE) * predicted_us[fastest]
    return default if is_tie else fastest
