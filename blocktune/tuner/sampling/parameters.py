"""Configs as points of an Optuna study: the kernel's name, and the parameters that this kernel has."""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import Trial

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.sampling.prospects import Point, identity

KERNEL = "kernel"
"""The parameter that says whose the others are, unless a function of its own has a parameter of this name."""


class ConfigSpace(Protocol):
    """What a study needs to know of a search space; see `SearchSpace`."""

    @property
    def feasible(self) -> Sequence[KernelConfig]: ...

    @property
    def parameter_names(self) -> Sequence[str]: ...

    def choices(self, name: str) -> Sequence[int]: ...


class Parameters:
    """The parameters of a space with their distributions.

    Values stand in a study as they are, so that its plots can be read: as a range where they are evenly spaced, such as
    stages, else as a list, such as blocks that double.
    """

    def __init__(self, space: ConfigSpace) -> None:
        kernels = tuple(dict.fromkeys(config.kernel for config in space.feasible))
        self._names = {config.kernel: tuple(config.parameters) for config in space.feasible}
        self._kernel = KERNEL if KERNEL not in space.parameter_names else f"{KERNEL} name"
        own = {name: _distribution(space.choices(name)) for name in space.parameter_names}
        self.distributions: dict[str, BaseDistribution] = {self._kernel: CategoricalDistribution(kernels)} | own
        self.configs = dict.fromkeys(space.feasible)
        self._configs = {identity(self.point(config)): config for config in space.feasible}

    def point(self, config: KernelConfig) -> dict[str, Any]:
        """Return a config's values by parameter."""
        return {self._kernel: config.kernel} | config.parameters

    def own(self, config: KernelConfig) -> dict[str, BaseDistribution]:
        """Return the distributions of the parameters that a config has."""
        return {name: self.distributions[name] for name in self.point(config)}

    def config(self, point: Point) -> KernelConfig | None:
        """Return the feasible config of a point, if there is one."""
        return self._configs.get(identity(point))

    def suggested(self, trial: Trial) -> KernelConfig | None:
        """Return the config that a trial suggests, or None where what it suggests is not feasible."""
        kernel = _suggest(trial, self._kernel, self.distributions[self._kernel])
        values = {name: _suggest(trial, name, self.distributions[name]) for name in self._names[kernel]}
        return self.config({self._kernel: kernel} | values)


def _distribution(values: Sequence[int]) -> BaseDistribution:
    """Return the distribution of ascending values."""
    steps = {after - before for before, after in itertools.pairwise(values)}
    if len(steps) > 1:
        return CategoricalDistribution(tuple(values))
    return IntDistribution(values[0], values[-1], step=next(iter(steps), 1))


def _suggest(trial: Trial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    assert isinstance(distribution, IntDistribution)
    return trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step)
