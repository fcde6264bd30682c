"""How each strategy is made: which sampler its study has, and which configs are tried before it proposes any."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, TPESampler
from optuna.study import Study

from blocktune.db.records.records import ConfigT
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.candidates.space import ConfigSpace
from blocktune.tuner.sampling.coordinate_sampler import CoordinateSampler
from blocktune.tuner.sampling.guided_sampler import GuidedSampler
from blocktune.tuner.sampling.own_sampler import sampler_class
from blocktune.tuner.sampling.parameters import Parameters
from blocktune.tuner.sampling.study_proposals import Pick, Ready, StudyProposals
from blocktune.tuner.search.proposals import by_prediction

MOST_GUIDED = 1000
"""Trials up to which correcting the model takes less time than measuring: it grows with their cube."""

STARTUP_SHARE = 3
"""One config in this many of a budget is tried in a given order before a sampler of Optuna's proposes."""

MIN_STARTUP = 10


class _Preferring(Protocol):
    """A sampler that also says which of some points is worth trying first."""

    def prefer(self, study: Study, points: Sequence[Mapping[str, Any]]) -> int: ...


def sampler_proposals(
    study: Study, sampler: BaseSampler, space: ConfigSpace[ConfigT], order: Sequence[ConfigT], startup: int
) -> StudyProposals[ConfigT]:
    """Return a search by a sampler of Optuna's, after the first configs of an order."""
    study.sampler = sampler
    return StudyProposals(study, Parameters(space), order=order, startup=startup, pick=by_prediction)


def tpe_proposals(
    study: Study, space: ConfigSpace[ConfigT], order: Sequence[ConfigT], startup: int, seed: int
) -> StudyProposals[ConfigT]:
    """Return a search by Optuna's TPE, after the first configs of an order. It keeps proposals apart whose scores are
    still outstanding, and models the parameters together."""
    return sampler_proposals(study, TPESampler(n_startup_trials=startup, seed=seed), space, order, startup)


def startup_of(trials: int, named: int = 0) -> int:
    """Return how many configs of a budget are tried before a sampler of Optuna's proposes any."""
    return min(max(MIN_STARTUP, trials // STARTUP_SHARE, named), trials)


def by_class(path: str, assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    """Return a search by a user's own sampler, after the model's favourites.

    Raises:
        UsageError: there is no such class, or it is not derived from Optuna's `BaseSampler`.
    """
    found = sampler_class(path)
    seeded = "seed" in inspect.signature(found).parameters
    return _from_model(assignment, study, found(**{"seed": assignment.seed} if seeded else {}))


def _guided_proposals(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    """Propose what may well be best; of a budget for everything, only the order matters."""
    if assignment.trials > MOST_GUIDED:
        return _model(assignment, study)
    parameters = Parameters(assignment.space)
    configs = dict.fromkeys((*assignment.feasible_first, *assignment.space.feasible))
    useful = {frozenset(parameters.point(config).items()): config for config in configs}
    sampler = GuidedSampler(
        lambda point: assignment.usefulness(useful[frozenset(point.items())]),
        search_space=parameters.distributions,
        points=[parameters.point(config) for config in configs],
    )

    def pick(ready: Ready[ConfigT]) -> ConfigT:
        for config, predicted_us in ready.items():
            if predicted_us is not None:
                sampler.revise(parameters.point(config), predicted_us)
        return _prefer(sampler, study, parameters, ready)

    study.sampler = sampler
    return StudyProposals(study, parameters, first=assignment.feasible_first, pick=pick)


def _coordinate(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    parameters, order = Parameters(assignment.space), assignment.random_order
    sampler = CoordinateSampler([parameters.point(config) for config in order], parameters.distributions)
    study.sampler = sampler
    return StudyProposals(
        study, parameters, first=order[:1], pick=lambda ready: _prefer(sampler, study, parameters, ready)
    )


def _prefer(sampler: _Preferring, study: Study, parameters: Parameters[ConfigT], ready: Ready[ConfigT]) -> ConfigT:
    configs = list(ready)
    return configs[sampler.prefer(study, [parameters.point(config) for config in configs])]


def _in_order(
    assignment: Assignment[ConfigT], study: Study, order: Sequence[ConfigT], pick: Pick[ConfigT] | None
) -> StudyProposals[ConfigT]:
    return StudyProposals(study, Parameters(assignment.space), first=order, pick=pick)


def _model(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    """Order configs by the model, which sees the compiled code of those that are ready."""
    return _in_order(assignment, study, assignment.by_usefulness, by_prediction)


def _random(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    return _in_order(assignment, study, assignment.random_order, None)


def _enumeration(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    return _in_order(
        assignment, study, list(dict.fromkeys((*assignment.feasible_first, *assignment.space.feasible))), None
    )


def _from_model(assignment: Assignment[ConfigT], study: Study, sampler: BaseSampler) -> StudyProposals[ConfigT]:
    return sampler_proposals(study, sampler, assignment.space, assignment.by_usefulness, _startup(assignment))


def _tpe_from_model(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    return tpe_proposals(study, assignment.space, assignment.by_usefulness, _startup(assignment), assignment.seed)


def _tpe(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    return tpe_proposals(study, assignment.space, assignment.random_order, _startup(assignment), assignment.seed)


def _gp(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    startup = _startup(assignment)
    sampler = GPSampler(n_startup_trials=startup, seed=assignment.seed, warn_independent_sampling=False)
    return sampler_proposals(study, sampler, assignment.space, assignment.by_usefulness, startup)


def _cmaes(assignment: Assignment[ConfigT], study: Study) -> StudyProposals[ConfigT]:
    startup = _startup(assignment)
    sampler = CmaEsSampler(n_startup_trials=startup, seed=assignment.seed, warn_independent_sampling=False)
    return _from_model(assignment, study, sampler)


def _startup(assignment: Assignment[ConfigT]) -> int:
    return startup_of(assignment.trials, len(assignment.feasible_first))


MAKERS: Mapping[str, Callable[[Assignment[Any], Study], StudyProposals[Any]]] = {
    "guided": _guided_proposals,
    "model": _model,
    "tpe_from_model": _tpe_from_model,
    "tpe": _tpe,
    "gp": _gp,
    "cmaes": _cmaes,
    "coordinate": _coordinate,
    "random": _random,
    "enumeration": _enumeration,
}
"""One for every name of `STRATEGIES`."""
