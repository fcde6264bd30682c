"""The points that a guided study chooses from, and the value that each of them may well have."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.sampling.correction import HOPELESS, ModelCorrection, Positions

OPTIMISM = 0.75
"""Standard deviations by which a point is taken to be better than expected."""

MOST_POINTS = 4096
"""Points of a larger space, or one without steps, that are drawn instead of all of them."""

MOST_STEPS = 8
"""Steps from one end of a range to the other where it has more choices than that."""

Point = Mapping[str, Any]
Space = Mapping[str, BaseDistribution]


class Prospects:
    """The prior of every point, corrected by measurements.

    Args:
        points: distinct ones; a point need not have all parameters of the space.
        space: their parameters.
        prior: the value that is expected of a point before anything is measured; infinite if it cannot be.
        sign: 1 where low values are good, -1 where high ones are.
    """

    def __init__(self, points: Sequence[Point], space: Space, prior: Callable[[Point], float], sign: int = 1) -> None:
        self.points = points
        self._positions = {identity(point): position for position, point in enumerate(points)}
        self._sign = sign
        self._predicted = np.array([self._log(prior(point)) for point in points])
        ordered = [name for name, distribution in space.items() if _is_ordered(distribution)]
        steps = np.array([[_steps(space[name], point.get(name)) for name in ordered] for point in points], dtype=float)
        kinds = [tuple(point.get(name) for name in space if name not in ordered) for point in points]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self._correction = ModelCorrection(
            steps.reshape(len(points), len(ordered)), np.array([numbers[kind] for kind in kinds])
        )

    def position(self, point: Point) -> int | None:
        """Return the index of a point, or None for one that is not among them."""
        return self._positions.get(identity(point))

    def revise(self, position: int, prediction: float) -> None:
        """Take a better prediction of one point."""
        self._predicted[position] = self._log(prediction)

    def learn(self, position: int, value: float) -> None:
        """Take a measured value."""
        self._correction.learn(position, self._log(value))

    def best(self, positions: Positions) -> int:
        """Return the position, among some, whose value may well be the best; of equals the first."""
        mean, deviation = self._correction.at(positions, self._predicted)
        return int(positions[np.argmin(self._predicted[positions] + mean - OPTIMISM * deviation)])

    def _log(self, value: float) -> float:
        """Return the logarithm of a value.

        Raises:
            UsageError: the value is not positive, or no number.
        """
        if not (isinstance(value, SupportsFloat) and float(value) > 0):
            raise UsageError(
                f"Values and predictions must be positive, since GuidedSampler compares them by their ratio, but got "
                f"{value!r}. Add an offset to the objective and to its prior, or use another sampler."
            )
        return self._sign * math.log(value) if math.isfinite(value) else HOPELESS


def identity(point: Point) -> frozenset[tuple[str, Any]]:
    """Return what equal points share, in whatever order their parameters stand."""
    return frozenset(point.items())


def points_of(space: Space, seed: int | None) -> list[Point]:
    """Return all points of a space, or `MOST_POINTS` drawn ones where it has more of them."""
    counts = [_count(distribution) for distribution in space.values()]
    if math.prod(counts) <= MOST_POINTS:
        values = [
            [_value(distribution, index) for index in range(int(count))]
            for distribution, count in zip(space.values(), counts, strict=True)
        ]
        return [dict(zip(space, crossed, strict=True)) for crossed in itertools.product(*values)]
    drawn = itertools.islice(_draw_points(space, np.random.default_rng(seed)), MOST_POINTS)
    return list({identity(point): point for point in drawn}.values())


def _draw_points(space: Space, generator: np.random.Generator) -> Iterator[Point]:
    while True:
        yield {name: _value_at(distribution, float(generator.random())) for name, distribution in space.items()}


def _count(distribution: BaseDistribution) -> float:
    """Return how many values a parameter has; infinitely many without steps."""
    match distribution:
        case CategoricalDistribution():
            return len(distribution.choices)
        case IntDistribution():
            return (distribution.high - distribution.low) // distribution.step + 1
        case FloatDistribution(step=float(step)):
            return round((distribution.high - distribution.low) / step) + 1
    return math.inf


def _value(distribution: BaseDistribution, index: int) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[index]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return distribution.low + index * (distribution.step or 0)


def _value_at(distribution: BaseDistribution, share: float) -> Any:
    """Return the value at this share, 0 to 1, of a parameter's range."""
    if isinstance(distribution, CategoricalDistribution):
        return _value(distribution, int(share * len(distribution.choices)))
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high = distribution.low, distribution.high
    if distribution.log:
        value = low * (high / low) ** share
        return round(value) if isinstance(distribution, IntDistribution) else min(value, high)
    if distribution.step is None:
        return low + share * (high - low)
    return _value(distribution, int(share * _count(distribution)))


def _is_ordered(distribution: BaseDistribution) -> bool:
    """Return whether one value is nearer to another than a third: numbers, be they a range or a list of choices."""
    return not isinstance(distribution, CategoricalDistribution) or _are_numbers(distribution.choices)


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _steps(distribution: BaseDistribution, value: Any) -> float:
    """Return how many steps a value is from the first; 0 for a point without this parameter."""
    if value is None:
        return 0.0
    if isinstance(distribution, CategoricalDistribution):
        return float(sorted(map(float, distribution.choices)).index(value))  # type: ignore[arg-type]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    low, high = distribution.low, distribution.high
    if distribution.single():
        return 0.0
    if distribution.log:
        return MOST_STEPS * math.log(value / low) / math.log(high / low)
    return float(min(MOST_STEPS, _count(distribution) - 1) * (value - low) / (high - low))
