"""Configs as points of an Optuna study: the kernel's name, and the parameters that this kernel has."""

import itertools
from collections.abc import Sequence
from typing import Any, Generic

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import Trial

from blocktune.db.records.records import ConfigT
from blocktune.runtime.autotuned.config import Plain
from blocktune.tuner.candidates.space import ConfigSpace
from blocktune.tuner.sampling.prospects import Point, identity

KERNEL = "kernel"
"""The parameter that says whose the others are, unless a function of its own has a parameter of this name."""


class Parameters(Generic[ConfigT]):
    """The parameters of a space with their distributions.

    Values stand in a study as they are, so that its plots can be read: as a range where they are evenly spaced, such as
    stages, else as a list, such as blocks that double. A parameter that only some configs of a kernel give is None in
    the others.
    """

    def __init__(self, space: ConfigSpace[ConfigT]) -> None:
        kernels = tuple(dict.fromkeys(config.kernel for config in space.feasible))
        named = [(config.kernel, name) for config in space.feasible for name in config.parameters]
        self._names = {kernel: tuple(dict.fromkeys(name for own, name in named if own == kernel)) for kernel in kernels}
        self._kernel = KERNEL if KERNEL not in space.parameter_names else f"{KERNEL} name"
        own = {name: _distribution(self._choices(space, name)) for name in space.parameter_names}
        self.distributions: dict[str, BaseDistribution] = {self._kernel: CategoricalDistribution(kernels)} | own
        self.configs = dict.fromkeys(space.feasible)
        self._configs = {identity(self.point(config)): config for config in space.feasible}

    def point(self, config: ConfigT) -> dict[str, Any]:
        """Return a config's values by parameter."""
        given = config.parameters
        return {self._kernel: config.kernel} | {name: given.get(name) for name in self._names[config.kernel]}

    def own(self, config: ConfigT) -> dict[str, BaseDistribution]:
        """Return the distributions of the parameters that a config has."""
        return {name: self.distributions[name] for name in self.point(config)}

    def config(self, point: Point) -> ConfigT | None:
        """Return the feasible config of a point, if there is one."""
        return self._configs.get(identity(point))

    def suggest(self, trial: Trial) -> ConfigT | None:
        """Return the config that a trial suggests, or None where what it suggests is not feasible."""
        kernel = _suggest(trial, self._kernel, self.distributions[self._kernel])
        values = {name: _suggest(trial, name, self.distributions[name]) for name in self._names[kernel]}
        return self.config({self._kernel: kernel} | values)

    def _choices(self, space: ConfigSpace[ConfigT], name: str) -> tuple[Plain, ...]:
        """Return the values of a parameter, None last where a config leaves it out that others of its kernel have."""
        having = (config for config in space.feasible if name in self._names[config.kernel])
        return (*space.choices(name), *((None,) if any(name not in config.parameters for config in having) else ()))


def _distribution(values: Sequence[Plain]) -> BaseDistribution:
    """Return the distribution of ascending values."""
    numbers = [value for value in values if type(value) is int]
    if len(numbers) < len(values):
        return CategoricalDistribution(tuple(values))
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(steps) > 1:
        return CategoricalDistribution(tuple(numbers))
    return IntDistribution(numbers[0], numbers[-1], step=next(iter(steps), 1))


def _suggest(trial: Trial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    assert isinstance(distribution, IntDistribution)
    return trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step)
