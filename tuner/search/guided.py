"""The model, corrected by what was measured: which config to try next when a model is good but not right.

The logarithm of a measured time over its prediction is taken for a Gaussian process of four parts: a constant, since
scores need not have the prediction's unit; a slope, by which the model exaggerates differences or understates them; a
constant of each kernel; and a part that configs share that are few steps apart in few parameters. How large that part
is, is read off the measurements (the likeliest of `LOCAL_DEVIATIONS`): a model that is good is followed, of a useless
one little is left. What is tried next is the config with the lowest time that it may well have: expected, less
`OPTIMISM` standard deviations.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.search.space import SearchSpace

COMMON_DEVIATION = 1.0
"""Of the constant."""

SLOPE_DEVIATION = 0.3
"""Of the slope: the share by which differences that the model sees are too large or too small."""

KERNEL_DEVIATION = 0.1
"""Of a kernel's constant."""

LOCAL_DEVIATIONS = (0.03, 0.06, 0.12, 0.25, 0.5)
"""Of what neighbours share."""

NOISE_DEVIATION = 0.01
"""Of one measurement."""

REACH_STEPS = 2.0
"""Steps of one parameter after which configs share 60 % of that part."""

OPTIMISM = 0.7

HOPELESS = 100.0
"""Logarithm of a time that stands for those of which the model thinks that they do not fit: they come last."""

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


class GuidedProposals:
    """Proposes and picks by the corrected model; never a config twice. See `Proposals`.

    Args:
        space: what may be proposed.
        first: proposed before all else, in this order.
        usefulness: the model before anything is compiled, by config.
    """

    def __init__(
        self, space: SearchSpace, first: Sequence[KernelConfig], usefulness: Callable[[KernelConfig], float]
    ) -> None:
        self._configs = list(dict.fromkeys((*first, *space.feasible)))
        self._first = deque(first)
        self._index = {config: index for index, config in enumerate(self._configs)}
        self._field = _Field(space, self._configs)
        self._predicted = np.array([_log(usefulness(config)) for config in self._configs])
        self._left = np.ones(len(self._configs), dtype=bool)
        self.size = len(self._configs)

    def recall(self, config: KernelConfig, score: float | None) -> None:
        if config in self._index:
            self._left[self._index[config]] = False
            self.tell(config, score)

    def propose(self) -> KernelConfig | None:
        while self._first:
            index = self._index[self._first.popleft()]
            if self._left[index]:
                return self._take(index)
        places = np.flatnonzero(self._left)
        return self._take(int(places[np.argmin(self._promise(places))])) if len(places) else None

    def pick(self, ready: Mapping[KernelConfig, float | None]) -> KernelConfig:
        places = np.array([self._index[config] for config in ready])
        for place, predicted_us in zip(places, ready.values(), strict=True):
            if predicted_us is not None:
                self._predicted[place] = _log(predicted_us)
        return self._configs[int(places[np.argmin(self._promise(places))])]

    def tell(self, config: KernelConfig, score: float | None) -> None:
        if score is not None:
            self._field.learn(self._index[config], _log(score))

    def _take(self, index: int) -> KernelConfig:
        self._left[index] = False
        return self._configs[index]

    def _promise(self, places: Places) -> Numbers:
        """The logarithm of the time that each of these may well have."""
        mean, deviation = self._field.correction(places, self._predicted)
        return np.asarray(self._predicted[places] + mean - OPTIMISM * deviation)


class _Field:
    """The Gaussian process: what measurements of some configs say about others."""

    def __init__(self, space: SearchSpace, configs: Sequence[KernelConfig]) -> None:
        names = space.parameter_names
        ranks = {name: {value: rank for rank, value in enumerate(space.choices(name))} for name in names}
        self._points = np.array(
            [[ranks[name].get(config.parameters.get(name, -1), 0) for name in names] for config in configs], dtype=float
        )
        kernels = {kernel: number for number, kernel in enumerate(dict.fromkeys(config.kernel for config in configs))}
        self._kernels = np.array([kernels[config.kernel] for config in configs])
        self._known: list[int] = []
        self._measured: list[float] = []
        self._same: list[Numbers] = []  # [config] for every known one: 1 where the kernel is the same, else 0
        self._near: list[Numbers] = []  # [config] for every known one: what they share of the local part
        self._posterior: _Posterior | None = None

    def learn(self, index: int, measured: float) -> None:
        """The logarithm of a measured time."""
        self._known.append(index)
        self._measured.append(measured)
        same = (self._kernels == self._kernels[index]).astype(float)
        apart = (self._points - self._points[index]) / REACH_STEPS
        self._same.append(same)
        self._near.append(same * np.exp(-0.5 * np.square(apart).sum(axis=1)))
        self._posterior = None

    def correction(self, places: Places, predicted: Numbers) -> tuple[Numbers, Numbers]:
        """(mean, standard deviation) of the logarithm of measured over predicted time, given the logarithms of all
        predicted ones."""
        if not self._known:
            return np.zeros(len(places)), np.zeros(len(places))
        if self._posterior is None:
            self._posterior = self._find_posterior(predicted)
        found = self._posterior
        slopes = np.minimum(predicted[places], found.slowest) - found.middle
        shared = _shared(slopes, found.slopes, found.same[places], found.near[places], found.local)
        own = _shared(slopes, slopes, np.ones(1), np.ones(1), found.local, each=True)
        explained = ((shared @ found.inverse) * shared).sum(axis=1)
        return shared @ found.weights, np.sqrt(np.maximum(own - explained, 0.0))

    def _find_posterior(self, predicted: Numbers) -> "_Posterior":
        known = np.array(self._known)
        middle = float(predicted[known].mean())
        slopes, off = predicted[known] - middle, np.array(self._measured) - predicted[known]
        same, near = np.column_stack(self._same), np.column_stack(self._near)
        candidates = {
            local: _shared(slopes, slopes, same[known], near[known], local) + NOISE_DEVIATION**2 * np.eye(len(known))
            for local in LOCAL_DEVIATIONS
        }
        local = max(candidates, key=lambda local: _likelihood(candidates[local], off))
        inverse = np.asarray(np.linalg.inv(candidates[local]), dtype=np.float64)
        return _Posterior(
            middle=middle,
            slowest=float(predicted[predicted < HOPELESS].max(initial=middle)),
            slopes=slopes,
            same=same,
            near=near,
            local=local,
            inverse=inverse,
            weights=inverse @ off,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posterior:
    """What some measurements amount to. middle: mean logarithm of the predictions of the measured ones. slowest: the
    largest one of all. same and near: [config, known], see `_Field`."""

    middle: float
    slowest: float
    slopes: Numbers
    same: Numbers
    near: Numbers
    local: float
    inverse: Numbers
    weights: Numbers


def _shared(
    rows: Numbers, columns: Numbers, same: Numbers, near: Numbers, local: float, *, each: bool = False
) -> Numbers:
    """Covariances of all rows with all columns, or of `each` with its own column; rows and columns are slopes."""
    slope = rows * columns if each else np.outer(rows, columns)
    return np.asarray(COMMON_DEVIATION**2 + SLOPE_DEVIATION**2 * slope + KERNEL_DEVIATION**2 * same + local**2 * near)


def _likelihood(covariance: Numbers, values: Numbers) -> float:
    """The logarithm of the probability density of normal values, less what does not depend on the covariance."""
    _, logdet = np.linalg.slogdet(covariance)
    return float(-0.5 * (values @ np.linalg.solve(covariance, values) + logdet))


def _log(time: float) -> float:
    return math.log(time) if math.isfinite(time) else HOPELESS
