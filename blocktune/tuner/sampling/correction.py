"""Corrects a model's predictions for all points by measurements of some: a Gaussian process.

The logarithm of a measured value over its prediction is taken for a Gaussian process of four parts: a constant, since
values need not have the prediction's unit; a slope, by which the model exaggerates differences or understates them; a
constant of each group, such as a kernel; and a part that points of a group share that are few steps apart in few
parameters. How large that part is, is read off the measurements (the likeliest of `LOCAL_DEVIATIONS`): a good model is
followed, a useless one has little weight.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COMMON_DEVIATION = 1.0
"""Of the constant, from the mean of what was measured."""

SLOPE_DEVIATION = 0.3
"""Of the slope: the share by which differences that the model sees are too large or too small."""

GROUP_DEVIATION = 0.1
"""Of a group's constant."""

LOCAL_DEVIATIONS = (0.03, 0.06, 0.12, 0.25, 0.5)
"""Of what neighbours share."""

NOISE_DEVIATION = 0.01
"""Of one measurement."""

REACH_STEPS = 2.0
"""Steps of one parameter after which points share 60 % of that part."""

HOPELESS = 100.0
"""Logarithm of a value that stands for those of which the model thinks that they cannot be: they come last."""

Numbers = NDArray[np.float64]
Positions = NDArray[np.int64]


class ModelCorrection:
    """The Gaussian process over a fixed list of points.

    Args:
        steps: [point, parameter], how many steps of each parameter a point is from the first choice.
        groups: [point], a number for each; points of different groups share no local part.
    """

    def __init__(self, steps: Numbers, groups: Positions) -> None:
        self._steps, self._groups = steps, groups
        self._known: list[int] = []
        self._measured: list[float] = []
        self._same: list[Numbers] = []  # [point] for every known one: 1 where the group is the same, else 0
        self._near: list[Numbers] = []  # [point] for every known one: what they share of the local part
        self._posterior: _Posterior | None = None

    def learn(self, position: int, measured: float) -> None:
        """Take the logarithm of a measured value."""
        self._known.append(position)
        self._measured.append(measured)
        same = (self._groups == self._groups[position]).astype(float)
        apart = (self._steps - self._steps[position]) / REACH_STEPS
        self._same.append(same)
        self._near.append(same * np.exp(-0.5 * np.square(apart).sum(axis=1)))
        self._posterior = None

    def at(self, positions: Positions, predicted: Numbers) -> tuple[Numbers, Numbers]:
        """Return (mean, standard deviation) of the logarithm of measured over predicted value at some points, given the
        logarithms of all predicted ones."""
        if not self._known:
            return np.zeros(len(positions)), np.zeros(len(positions))
        if self._posterior is None:
            self._posterior = self._find_posterior(predicted)
        found = self._posterior
        slopes = np.minimum(predicted[positions], found.slowest) - found.middle
        shared = _covariances(slopes, found.slopes, found.same[positions], found.near[positions], found.local)
        own = _covariances(slopes, slopes, np.ones(1), np.ones(1), found.local, each=True)
        explained = np.square(shared @ found.whitening.T).sum(axis=1)
        return found.level + shared @ found.weights, np.sqrt(np.maximum(own - explained, 0.0))

    def _find_posterior(self, predicted: Numbers) -> "_Posterior":
        known = np.array(self._known)
        middle = float(predicted[known].mean())
        slopes, off = predicted[known] - middle, np.array(self._measured) - predicted[known]
        level = float(off.mean())  # the unit, which is no part of what the prediction explains
        off = off - level
        same, near = np.column_stack(self._same), np.column_stack(self._near)
        noise = NOISE_DEVIATION**2 * np.eye(len(known))
        factors = {
            local: _factor(_covariances(slopes, slopes, same[known], near[known], local) + noise)
            for local in LOCAL_DEVIATIONS
        }
        local = max(factors, key=lambda local: _likelihood(factors[local], off))
        # A product with the factor's inverse takes a tenth of the time of solving for every point; its condition is the
        # root of the covariance's.
        whitening = np.asarray(np.linalg.inv(factors[local]), dtype=np.float64)
        return _Posterior(
            level=level,
            middle=middle,
            slowest=float(predicted[predicted < HOPELESS].max(initial=middle)),
            slopes=slopes,
            same=same,
            near=near,
            local=local,
            whitening=whitening,
            weights=whitening.T @ (whitening @ off),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posterior:
    """The posterior after some measurements. level: mean logarithm of measured over predicted values. middle: mean
    logarithm of the predictions of the measured ones. slowest: the largest one of all. same and near: [point, known],
    see `ModelCorrection`. whitening: the inverse of Cholesky's factor of the covariance of the known ones. weights: the
    covariance's inverse times what was measured, less the level."""

    level: float
    middle: float
    slowest: float
    slopes: Numbers
    same: Numbers
    near: Numbers
    local: float
    whitening: Numbers
    weights: Numbers


def _covariances(
    rows: Numbers, columns: Numbers, same: Numbers, near: Numbers, local: float, *, each: bool = False
) -> Numbers:
    """Return the covariances of all rows with all columns, or of `each` with its own column; rows and columns are
    slopes."""
    slope = rows * columns if each else np.outer(rows, columns)
    return np.asarray(COMMON_DEVIATION**2 + SLOPE_DEVIATION**2 * slope + GROUP_DEVIATION**2 * same + local**2 * near)


def _factor(covariance: Numbers) -> Numbers:
    """Return Cholesky's factor, a lower triangle."""
    return np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)


def _likelihood(factor: Numbers, values: Numbers) -> float:
    """Return the logarithm of the probability density of normal values, less what does not depend on the covariance, of
    which this is Cholesky's factor."""
    scaled = np.linalg.solve(factor, values)
    return float(-0.5 * (scaled @ scaled) - np.log(np.diagonal(factor)).sum())
