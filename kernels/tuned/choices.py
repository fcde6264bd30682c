"""The choices that a tuned function gives its search, and which of them can run a call."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from blocktune.kernels.tuned.config import UserConfig
from blocktune.kernels.values.errors import UsageError

Constraint = Callable[..., bool]
"""Takes a config's parameters, then the arguments of the call, and says whether the config can run it."""

MAX_CONFIGS = 100_000


class Choices:
    """All configs of a function: every combination of the choices of its parameters.

    Args:
        name: of the function, `module:name`.
        parameters: the choices of each.
        constraints: by their rule in words.
        default: the parameters that serve until something better is known; None is the first config that can run.

    Raises:
        UsageError: a parameter has no choices, or some that are no integers; or the default is not among them.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, tuple[int, ...]],
        constraints: Mapping[str, Constraint],
        default: Mapping[str, int] | None,
    ) -> None:
        self.name, self.parameters, self.constraints = name, parameters, constraints
        self.all = self._all()
        self._default = None if default is None else UserConfig(name, tuple(default.items()))
        if self._default is not None and self._default not in self.all:
            raise UsageError(
                f"`default` of {name} is one of the choices of every parameter, but got {dict(default or {})}. Add it "
                "to the choices."
            )

    def feasible(self, arguments: Mapping[str, Any]) -> tuple[UserConfig, ...]:
        """The configs that fulfil all constraints for these arguments, in the order of the choices."""
        return tuple(config for config in self.all if not self.violations(config, arguments))

    def violations(self, config: UserConfig, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The rules that a config breaks for these arguments; empty if it can run."""
        given = config.parameters
        if given.keys() != self.parameters.keys():
            return (f"`parameters of {self.name}` are {', '.join(self.parameters)}, but got {', '.join(given)}.",)
        strangers = tuple(
            f"`{name}` must be one of {choices}, but got {given[name]}."
            for name, choices in self.parameters.items()
            if given[name] not in choices
        )
        return strangers or tuple(
            f"`{rule}` must hold, but does not for {config.label}."
            for rule, holds in self.constraints.items()
            if not holds(given, **arguments)
        )

    def default(self, arguments: Mapping[str, Any]) -> UserConfig | None:
        """What serves without any tuning; None if no config can run these arguments."""
        if self._default is not None and not self.violations(self._default, arguments):
            return self._default
        return next((config for config in self.all if not self.violations(config, arguments)), None)

    def _all(self) -> tuple[UserConfig, ...]:
        count = 1
        for name, choices in self.parameters.items():
            count *= len(choices)
            if not choices or count > MAX_CONFIGS:
                raise UsageError(
                    f"Each parameter has choices, and all together up to {MAX_CONFIGS} combinations, but `{name}` of "
                    f"{self.name} has {len(choices)}, which makes {count}. Name other choices."
                )
        combinations = itertools.product(*self.parameters.values())
        return tuple(UserConfig(self.name, tuple(zip(self.parameters, values, strict=True))) for values in combinations)
