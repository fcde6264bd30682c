"""An Optuna sampler that looks next to the best point so far: `CoordinateSampler`."""

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from blocktune.tuner.sampling.prospects import Point, identity

KEPT = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)
"""States of trials whose points are not proposed again."""


class CoordinateSampler(BaseSampler):
    """Asks for the neighbours of the best point so far, one parameter a step up or down or another category next to
    it; where all of them were tried, for the next point in a given order.

    Args:
        points: to choose from, in the order in which they are proposed where no neighbour is left. The first is the
            best until one was measured.
        search_space: the parameters' distributions.
        seed: of parameters that the search space does not have.
    """

    def __init__(
        self, points: Sequence[Point], search_space: Mapping[str, BaseDistribution], *, seed: int | None = None
    ) -> None:
        self._points = list(points)
        self._space = dict(search_space)
        self._random = RandomSampler(seed=seed)
        names = dict.fromkeys(name for point in points for name in point)
        values = {name: dict.fromkeys(point[name] for point in points if name in point) for name in names}
        self._ranks = {
            name: {value: rank for rank, value in enumerate(sorted(found))}
            for name, found in values.items()
            if all(isinstance(value, int | float) for value in found)
        }
        self._asked: dict[int, Point] = {}  # by number of the trial

    def reseed_rng(self) -> None:
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        trials = study.get_trials(deepcopy=False, states=KEPT)
        tried = {identity(self._asked.get(trial.number, trial.params)) for trial in trials}
        best = self._best(trials)
        left = [point for point in self._points if identity(point) not in tried]
        near = (point for point in left if self._distance(point, best) <= 1)
        chosen = next(near, None) or (left or [best])[0]
        self._asked[trial.number] = chosen
        return dict(chosen)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def prefer(self, study: Study, points: Sequence[Point]) -> int:
        """Return the index of the point, among some, that is nearest to the best so far."""
        best = self._best(study.get_trials(deepcopy=False, states=KEPT))
        return min(range(len(points)), key=lambda index: self._distance(points[index], best))

    def _best(self, trials: Sequence[FrozenTrial]) -> Point:
        values = [(trial.value, trial.params) for trial in trials if trial.value is not None]
        return min(values, key=lambda found: found[0])[1] if values else self._points[0]

    def _distance(self, point: Point, other: Point) -> int:
        """Return the steps of the parameters that both have, and one for every category that differs."""
        steps = 0
        for name in point.keys() & other.keys():
            ranks = self._ranks.get(name)
            steps += point[name] != other[name] if ranks is None else abs(ranks[point[name]] - ranks[other[name]])
        return steps
