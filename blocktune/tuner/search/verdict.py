"""The verdict of the finals: the winner, and whether it won by more than the noise."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from blocktune.db.records.records import ConfigT, Objective
from blocktune.tuner.measure.protocol import TIE_BAND, middle, surely, within

PREDICTED_TIE = 0.02
"""Predictions this close say nothing about who is faster: the model is off by more (notes/models/search.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The default's time over a config's, paired by round.

    median, low and high: median, 5th and 95th percentile of the rounds' ratios. middle: the mean of their middle half,
    which decides. surely: what it is at least.
    """

    median: float
    low: float
    high: float
    middle: float
    surely: float

    @property
    def beyond_noise(self) -> bool:
        """Whether it is a speed-up at all: more than the tie band, and surely more than none."""
        return self.surely > 1.0 and self.middle > 1.0 + TIE_BAND

    @property
    def label(self) -> str:
        return f"{self.median:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Generic[ConfigT]):
    """The winner and why. speedup is over the default, of what was compared, and None when the default was not in the
    finals."""

    winner: ConfigT
    reason: str
    speedup: Speedup | None


def decide(
    samples: Mapping[ConfigT, Sequence[float]],
    default: ConfigT,
    order: Sequence[ConfigT],
    objective: Objective = Objective.TIME,
) -> Verdict[ConfigT]:
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
        middle=middle(ratios)[0],
        surely=surely(ratios),
    )


_WORDS = {Objective.TIME: ("faster", "the fastest"), Objective.ENERGY: ("more frugal", "the most frugal")}
_UNITY = Speedup(median=1.0, low=1.0, high=1.0, middle=1.0, surely=1.0)


def _first_of_equals(samples_us: Mapping[ConfigT, Sequence[float]], order: Sequence[ConfigT]) -> ConfigT:
    """Return the first in `order` of the finalists within the tie band of the fastest."""
    rank = {config: index for index, config in enumerate(order)}
    ranked = sorted(samples_us, key=lambda config: rank.get(config, len(rank)))
    return within(samples_us, ranked, 1.0 + TIE_BAND)[0]


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return the nearest-rank quantile of ascending values."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def decide_by_predictions(predicted_us: Mapping[ConfigT, float], default: ConfigT) -> ConfigT:
    """Return the winner of predictions: the fastest, but the default where it is as good."""
    fastest = min(predicted_us, key=lambda config: predicted_us[config])
    is_tie = default in predicted_us and predicted_us[default] <= (1 + PREDICTED_TIE) * predicted_us[fastest]
    return default if is_tie else fastest
