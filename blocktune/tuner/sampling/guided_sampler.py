"""An Optuna sampler that knows a model of the objective: `GuidedSampler`.

    sampler = GuidedSampler(prior=lambda params: model_us(params["block_m"], params["block_n"]))
    study = optuna.create_study(sampler=sampler)
    study.optimize(measured_us, n_trials=40)

Optuna's GPSampler begins with a mean that is the same everywhere. Here the mean is the prior's, and trials teach by how
much it is off, and where: see `Correction`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.sampling.prospects import Point, Prospects, identity, points_of

MOST_FAILURES = 3
"""Failed trials after which a point counts as tried. To Optuna's samplers a failed trial is as if it had not been, as
where its process was killed; but a point that always fails must not be proposed without end."""


class GuidedSampler(BaseSampler):
    """Asks for the point whose value may well be the best by a prior and by all that was measured.

    Values and predictions are positive, such as times or costs; they need not have the same unit. A point is proposed
    once, as long as there are others. A space of more than 4096 points, or one without steps, is searched at 4096 drawn
    points. Trials of other samplers, processes and studies teach it as its own do; pruned trials by their last
    intermediate value. Without a seed of its own nothing here is left to chance, apart from these draws and from
    parameters that the search space does not have.

    Args:
        prior: the value that is expected of parameters, given by name; infinite if they cannot work.
        search_space: the parameters' distributions; None is what the finished trials of the study have in common, so
            that the first trials are drawn at random.
        points: the only ones to choose from, as where not every combination is valid; they need not have all
            parameters. None is the whole search space. Needs a `search_space`.
        seed: of what is drawn.

    Raises:
        UsageError: the prior is no function, or there are `points` but no `search_space`.
    """

    def __init__(
        self,
        prior: Callable[[Mapping[str, Any]], float],
        *,
        search_space: Mapping[str, BaseDistribution] | None = None,
        points: Sequence[Mapping[str, Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        if not callable(prior):
            raise UsageError(
                f"`prior` must be a function of parameters by name, but got {prior!r:.100}. For example: "
                "`lambda point: 1.0`, which expects the same of all."
            )
        if points is not None and search_space is None:
            raise UsageError(
                "`points` need a `search_space`, but got None. Pass the distributions of their parameters."
            )
        self._prior = prior
        self._space = None if search_space is None else dict(search_space)
        self._points = None if points is None else list(points)
        self._seed = seed
        self._random = RandomSampler(seed=seed)
        self._intersection = IntersectionSearchSpace()
        self._revised: dict[frozenset[tuple[str, Any]], float] = {}
        self._begin({})

    def reseed_rng(self) -> None:
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._intersection.calculate(study) if self._space is None else dict(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        prospects = self._prospects_of(study, search_space)
        left = np.ones(len(prospects.points), dtype=bool)
        left[self._tried_positions(study, prospects)] = False
        position = prospects.best(np.flatnonzero(left if left.any() else ~left))
        self._asked[trial.number] = position
        return dict(prospects.points[position])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def revise(self, point: Mapping[str, Any], prediction: float) -> None:
        """Replace the prior at one point, as when it is compiled and more is known of it."""
        self._revised[identity(point)] = prediction
        position = None if self._prospects is None else self._prospects.position(point)
        if self._prospects is not None and position is not None:
            self._prospects.revise(position, prediction)

    def prefer(self, study: Study, points: Sequence[Mapping[str, Any]]) -> int:
        """Return the index of the point, among some of the search space, that is worth trying first.

        Raises:
            UsageError: one of them is not in the search space.
        """
        prospects = self._prospects_of(study, self._space or self._intersection.calculate(study))
        positions = [prospects.position(point) for point in points]
        if None in positions:
            raise UsageError(
                f"The point {points[positions.index(None)]} is not in the sampler's search space. Add it to `points`."
            )
        return positions.index(prospects.best(np.array(positions)))

    def _begin(self, space: Mapping[str, BaseDistribution]) -> None:
        """Forget what was learnt. It is learnt again from the trials."""
        self._learnt_in = dict(space)
        self._prospects: Prospects | None = None
        self._asked: dict[int, int] = {}  # positions by numbers of trials
        self._finished: dict[int, int | None] = {}

    def _prospects_of(self, study: Study, space: Mapping[str, BaseDistribution]) -> Prospects:
        """Return the prospects after they have learnt from all finished trials."""
        self._raise_error_if_multi_objective(study)
        if self._learnt_in != space:
            self._begin(space)
        trials = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
        fresh = [trial for trial in trials if trial.number not in self._finished]
        found = self._prospects
        if found is None or any(self._is_strange(trial, found) for trial in fresh):
            self._begin(space)
            found, fresh = self._new_prospects(study, trials), trials
        for trial in fresh:
            self._learn(found, trial)
        self._prospects = found
        return found

    def _new_prospects(self, study: Study, trials: Sequence[FrozenTrial]) -> Prospects:
        """Return the prospects of the search space and of trials that were made outside of its drawn points."""
        points = self._points if self._points is not None else points_of(self._learnt_in, self._seed)
        known = {identity(point): point for point in (*points, *filter(None, map(self._point, trials)))}
        sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
        return Prospects(list(known.values()), self._learnt_in, self._expected_score, sign)

    def _is_strange(self, trial: FrozenTrial, prospects: Prospects) -> bool:
        """Return whether this trial has a value at a point that is not among those to choose from."""
        point = self._point(trial)
        return trial.value is not None and bool(point) and prospects.position(point) is None

    def _learn(self, prospects: Prospects, trial: FrozenTrial) -> None:
        position = self._finished[trial.number] = prospects.position(self._point(trial))
        if position is not None and trial.value is not None and not _is_infeasible(trial):
            prospects.learn(position, trial.value)

    def _tried_positions(self, study: Study, prospects: Prospects) -> list[int]:
        """Return the positions that were tried, are being tried or have failed too often."""
        trials = study.get_trials(deepcopy=False)
        failed = Counter(self._position(trial, prospects) for trial in trials if trial.state == TrialState.FAIL)
        positions = {self._position(trial, prospects) for trial in trials if trial.state != TrialState.FAIL}
        positions |= {position for position, failures in failed.items() if failures >= MOST_FAILURES}
        return [position for position in positions if position is not None]

    def _position(self, trial: FrozenTrial, prospects: Prospects) -> int | None:
        if trial.number in self._finished:
            return self._finished[trial.number]
        return self._asked.get(trial.number, prospects.position(self._point(trial)))

    def _point(self, trial: FrozenTrial) -> Point:
        return {name: value for name, value in trial.params.items() if name in self._learnt_in}

    def _expected_score(self, point: Point) -> float:
        return self._revised.get(identity(point)) or self._prior(point)


def _is_infeasible(trial: FrozenTrial) -> bool:
    return any(value > 0 for value in trial.constraints.values())
