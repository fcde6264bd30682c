"""The search strategies by name: how each is made for a problem. All speak the protocol `Proposals`.

`tune run` uses `DEFAULT`, and `tune replay` compares them on recorded sweeps; docs/models/search.md has what
came of it.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.search.guided import GuidedProposals
from blocktune.tuner.search.proposals import (
    MIN_STARTUP,
    STARTUP_SHARE,
    Enumeration,
    Proposals,
    TpeProposals,
    by_prediction,
)
from blocktune.tuner.search.space import SearchSpace

MOST_GUIDED = 1000
"""Trials up to which correcting the model takes less time than measuring: it grows with their cube."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a strategy is made for.

    space: what may be proposed. first: proposed before all else, in this order; infeasible ones are left out.
    usefulness: the model before anything is compiled, the smallest first. trials: how many configs will be tried at
    most. seed: of what is random.
    """

    space: SearchSpace
    first: Sequence[KernelConfig]
    usefulness: Callable[[KernelConfig], float] = field(repr=False)
    trials: int
    seed: int = 0

    @property
    def named(self) -> list[KernelConfig]:
        """Those of `first` that are feasible."""
        feasible = set(self.space.feasible)
        return [config for config in dict.fromkeys(self.first) if config in feasible]

    @property
    def by_usefulness(self) -> list[KernelConfig]:
        """Every config: `first`, then by the model."""
        return list(dict.fromkeys((*self.named, *sorted(self.space.feasible, key=self.usefulness))))

    @property
    def shuffled(self) -> list[KernelConfig]:
        """Every config: `first`, then at random."""
        rest = list(self.space.feasible)
        random.Random(self.seed).shuffle(rest)
        return list(dict.fromkeys((*self.named, *rest)))


class ModelOrder(Enumeration):
    """Every config in the order of the model, which sees the compiled code of those that are ready."""

    def pick(self, ready: Mapping[KernelConfig, float | None]) -> KernelConfig:
        return by_prediction(ready)


class CoordinateDescent:
    """The neighbours of the best config so far, one parameter a step up or down or another kernel's next to it; a
    random config where all of them were tried."""

    def __init__(self, order: Iterable[KernelConfig], space: SearchSpace, *, start: KernelConfig) -> None:
        self._rest = deque(order)
        self.size = len(self._rest)
        self._space = space
        self._choices = {name: space.choices(name) for name in space.parameter_names}
        self._best, self._best_score = start, float("inf")
        self._tried: set[KernelConfig] = set()

    def recall(self, config: KernelConfig, score: float | None) -> None:
        self._tried.add(config)
        self.tell(config, score)

    def propose(self) -> KernelConfig | None:
        near = (config for config in (self._best, *self._neighbours()) if config not in self._tried)
        anywhere = (config for config in self._rest if config not in self._tried)
        config = next(near, None) or next(anywhere, None)
        if config is not None:
            self._tried.add(config)
        return config

    def pick(self, ready: Mapping[KernelConfig, float | None]) -> KernelConfig:
        return min(ready, key=self._distance)

    def tell(self, config: KernelConfig, score: float | None) -> None:
        if score is not None and score < self._best_score:
            self._best, self._best_score = config, score

    def _neighbours(self) -> list[KernelConfig]:
        """Feasible configs that differ from the best in one parameter, by one step, or in the kernel alone."""
        return [config for config in self._rest if self._distance(config) == 1]

    def _distance(self, config: KernelConfig) -> int:
        own, other = self._best.parameters, config.parameters
        steps = sum(
            abs(self._choices[name].index(own[name]) - self._choices[name].index(other[name]))
            for name in own.keys() & other.keys()
        )
        return steps + (config.kernel != self._best.kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """make: what a search asks, for a problem. chance: whether the seed matters. about: what it is, in a line."""

    make: Callable[[Problem], Proposals] = field(repr=False)
    chance: bool
    about: str


def _guided(problem: Problem) -> Proposals:
    """Of a budget for everything, only the order matters."""
    if problem.trials > MOST_GUIDED:
        return _model(problem)
    return GuidedProposals(problem.space, problem.named, problem.usefulness)


def _model(problem: Problem) -> Proposals:
    return ModelOrder(problem.by_usefulness)


def _tpe(problem: Problem) -> Proposals:
    return TpeProposals(problem.space, problem.shuffled, startup=_startup(problem), seed=problem.seed)


def _tpe_from_model(problem: Problem) -> Proposals:
    return TpeProposals(problem.space, problem.by_usefulness, startup=_startup(problem), seed=problem.seed)


def _coordinate(problem: Problem) -> Proposals:
    order = problem.shuffled
    return CoordinateDescent(order, problem.space, start=order[0])


def _random(problem: Problem) -> Proposals:
    return Enumeration(problem.shuffled)


def _enumeration(problem: Problem) -> Proposals:
    return Enumeration(dict.fromkeys((*problem.named, *problem.space.feasible)))


def _startup(problem: Problem) -> int:
    return min(max(MIN_STARTUP, problem.trials // STARTUP_SHARE, len(problem.named)), problem.trials)


DEFAULT = "guided"

STRATEGIES: Mapping[str, Strategy] = {
    "guided": Strategy(make=_guided, chance=False, about="the model, corrected by every measurement"),
    "model": Strategy(make=_model, chance=False, about="the model's order"),
    "tpe_from_model": Strategy(make=_tpe_from_model, chance=True, about="Optuna's TPE after the model's favourites"),
    "tpe": Strategy(make=_tpe, chance=True, about="Optuna's TPE after random configs"),
    "coordinate": Strategy(make=_coordinate, chance=True, about="coordinate descent from the default"),
    "random": Strategy(make=_random, chance=True, about="random configs"),
    "enumeration": Strategy(make=_enumeration, chance=False, about="every config in the order of the space"),
}


def make_proposals(problem: Problem, strategy: str = DEFAULT) -> Proposals:
    """What a search by this strategy asks for the next config."""
    return STRATEGIES[strategy].make(problem)
