"""How long configs are expected to take for a shape that was not measured, and how sure that is.

The default of the first kernel is the measure of all: every other config is expected to be faster or slower than that
one by some factor. What other shapes say of it counts by how near they are (`distance`), and the model says
what changes between them.

    estimator = Estimator(shape, limits, correction)
    estimator.config_over_default(kernel, relative, predicted)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.selection.correction import DeviceCorrection, LogRatio, RelativeConfig, Trust
from blocktune.runtime.selection.near_shapes import distance_but_masks

FAR = 8.0
"""Doublings by which shapes differ beyond which one says nothing of the other."""

OTHER_FEATURES = 2.0
"""Doublings that other features of a shape count as: the same kernels take them with other code."""

OTHER_WIDTH = 4.0
"""Doublings of distance that one doubling of the head dimensions counts as: it changes what tiles fit, but not what a
call waits for."""

HIDDEN_PAIRS = 6.0
"""Doublings of distance that hiding all pairs of queries and keys would count as. A causal square hides half of them, a
few queries at the end of many keys next to none."""

WON = LogRatio(-0.02, 0.0)
"""The assumed ratio of a stored winner to the default, if nothing else is known: it won by more than the noise."""

OTHER_KERNEL = 0.1
"""Mean and spread of a kernel's default over that of the first one, where nothing was measured: kernels are in the
order in which they were found to be best."""


SHARED = 0.5
"""Share of the nearest measurement's variance that no other one lessens: shapes that are far on the same side are off
together."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A logarithmic ratio of two times: its mean and its variance."""

    mean: float
    variance: float

    def plus(self, other: "Guess") -> "Guess":
        """Return the guess of the product of two independent ratios."""
        return Guess(self.mean + other.mean, self.variance + other.variance)

    def joined(self, other: "Guess") -> "Guess":
        """Return what both guesses of one ratio say together, the surer one more."""
        weight, others = 1 / self.variance, 1 / other.variance
        return Guess((self.mean * weight + other.mean * others) / (weight + others), 1 / (weight + others))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The expected time of a config.

    time_us: the expected time. ratio: over the default of the first kernel. spread: the standard deviation of that
    ratio as a fraction; 0 for that default itself. shapes: how many measured shapes it rests on.
    """

    config: KernelConfig
    time_us: float
    ratio: float
    spread: float
    shapes: int

    @property
    def time_label(self) -> str:
        """The time with its spread, which the default of the first kernel, the measure of all others, does not have."""
        spread = f" +- {100 * self.spread:.1f} %" if self.spread else ""
        return f"{self.time_us:.4g} us{spread}"

    @property
    def label(self) -> str:
        """The config, its time and what that rests on."""
        return f"{self.config.label}, {self.time_label} by {self.shapes} measured shapes"

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config.to_json(),
            "time_us": self.time_us,
            "ratio": self.ratio,
            "spread": self.spread,
            "shapes": self.shapes,
        }


class Estimator:
    """Guesses of one shape, by what was measured for shapes near it.

    Args:
        shape: the shape.
        correction: what was measured.
        further: doublings that are added to every distance, as for measurements of another device.
    """

    def __init__(self, shape: AttentionShape, correction: DeviceCorrection, further: float = 0.0) -> None:
        self._shape, self._trust = shape, correction.trust
        self._config_prior = Guess(self._trust.prior, self._trust.doubt**2)
        self._of_kernel: dict[str, dict[RelativeConfig, list[tuple[float, LogRatio]]]] = {}
        self._near = [
            (away + further, measured)
            for measured in correction.measured
            if (away := distance_between(measured.shape, shape)) <= FAR
        ]

    def trust(self, trust: Trust) -> None:
        """Guess with other constants from now on; with another drift, winners that were learned are forgotten."""
        if trust.drift != self._trust.drift:
            self._of_kernel = {}
        self._trust, self._config_prior = trust, Guess(trust.prior, trust.doubt**2)

    @property
    def shapes(self) -> int:
        """How many measured shapes are near."""
        return len(self._near)

    def learn_winner(self, kernel: str, config: RelativeConfig, shape: AttentionShape, predicted: float) -> None:
        """Count a stored winner of a near shape, unless more is known of that shape.

        Args:
            kernel: its name.
            config: its parameters, relative to the default there.
            shape: what it won.
            predicted: the logarithm of the ratio by the model, which is taken for the same there as here.
        """
        away = distance_between(shape, self._shape)
        if away <= FAR and all(measured.shape != shape for _, measured in self._near):
            won = (self._variance(away), LogRatio(WON.measured, predicted))
            self._ratios(kernel).setdefault(config, []).append(won)

    def level(self) -> float:
        """Return the logarithm of measured over predicted time of the default: a mean in which near shapes count most;
        0 without any."""
        weights = [1 / self._variance(away) for away, _ in self._near]
        levels = [measured.level for _, measured in self._near]
        return sum(map(float.__mul__, weights, levels)) / sum(weights) if weights else 0.0

    def most_promising(self, kernel: str, count: int) -> list[RelativeConfig]:
        """Return the configs of a kernel that did best for near shapes, the best first."""
        ratios = self._ratios(kernel)
        means = {config: self._combine(found, None, self._config_prior).mean for config, found in ratios.items()}
        return sorted(means, key=lambda config: means[config])[:count]

    def default_over_first(self, kernel: str, first: str, predicted: float) -> tuple[Guess, int]:
        """Guess the default of a kernel over that of the first kernel, and say by how many shapes."""
        if kernel == first:
            return Guess(0.0, 0.0), self.shapes
        found = [
            (self._variance(away, measured.is_older(kernel)), measured.defaults[kernel])
            for away, measured in self._near
            if measured.first == first and kernel in measured.defaults
        ]
        return self._combine(found, predicted, Guess(OTHER_KERNEL, OTHER_KERNEL**2)), len(found)

    def config_over_default(self, kernel: str, config: RelativeConfig, predicted: float) -> tuple[Guess, int]:
        """Guess a config over the default of its kernel, and say by how many shapes.

        Args:
            kernel: its name.
            config: its parameters, relative to the default.
            predicted: the logarithm of the ratio by the model.
        """
        found = self._ratios(kernel).get(config, [])
        return self._combine(found, predicted, self._config_prior), len(found)

    def _ratios(self, kernel: str) -> dict[RelativeConfig, list[tuple[float, LogRatio]]]:
        """Return the ratios of a kernel's configs over its default, of all near shapes, with their variances."""
        if kernel not in self._of_kernel:
            found: dict[RelativeConfig, list[tuple[float, LogRatio]]] = {}
            for away, measured in self._near:
                variance = self._variance(away, measured.is_older(kernel))
                for config, ratio in measured.configs.get(kernel, {}).items():
                    found.setdefault(config, []).append((variance, ratio))
            self._of_kernel[kernel] = found
        return self._of_kernel[kernel]

    def _variance(self, away: float, older: bool = False) -> float:
        trust = self._trust
        return trust.noise**2 + away * trust.drift**2 + (trust.older**2 if older else 0.0)

    def _combine(self, found: Iterable[tuple[float, LogRatio]], predicted: float | None, prior: Guess) -> Guess:
        """Join what other shapes say with the prior: each with the change that the model predicts from there, or
        without any where no prediction is given."""
        shift = 0.0 if predicted is None else self._trust.shift
        here = predicted or 0.0
        expected = Guess(prior.mean + shift * here, prior.variance)
        weight, total, surest = 0.0, 0.0, math.inf
        for variance, ratio in found:
            change = shift * (here - ratio.predicted)
            doubted = variance + (change / 2) ** 2  # a change that the model predicts may be off by half of itself
            weight += 1 / doubted
            total += (ratio.measured + change) / doubted
            surest = min(surest, doubted)
        if not weight:
            return expected
        return expected.joined(Guess(total / weight, 1 / weight + SHARED * surest))


def distance_between(measured: AttentionShape, shape: AttentionShape) -> float:
    """Return how far a measured shape is from another one, in doublings; infinite where other kernels serve it."""
    if (measured.direction, measured.element_bytes) != (shape.direction, shape.element_bytes):
        return math.inf
    widths = abs(math.log2(measured.head_dim / shape.head_dim)) + abs(math.log2(measured.head_dim_v / shape.head_dim_v))
    features = OTHER_FEATURES if measured.features != shape.features else 0.0
    masks = HIDDEN_PAIRS * abs(_visible_share(measured) - _visible_share(shape))
    return distance_but_masks(measured, shape) + masks + OTHER_WIDTH * widths / 2 + features


def _visible_share(shape: AttentionShape) -> float:
    """Return the share of (query, key) pairs that mask and window leave."""
    if shape.causal is Causal.NONE and shape.features.window is None:
        return 1.0
    return shape.visible_pairs / (shape.seqlen_q * shape.seqlen_k)
