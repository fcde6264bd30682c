"""Which config to try next: what a search asks of a strategy, and two strategies: every config in turn, and Optuna.

Optuna's TPE samples in memory, over one study for all kernels. Its parameters are the kernel's name as a category and
every block parameter as the rank among its choices, since blocks double and their order matters. All kernels share one
fixed set of parameters, so that TPE models them jointly; a parameter that a kernel lacks is ignored.

A study over the feasible configs themselves would never propose an infeasible point, but TPE could learn nothing from
one config about its neighbours. Points outside the feasible set and repeated ones cost a few milliseconds here: the
first are told as pruned, which teaches TPE to avoid them, and neither is compiled or measured.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.search.space import SearchSpace

STARTUP_SHARE = 3
"""One in so many of a budget is tried in a given order before TPE proposes."""

MIN_STARTUP = 10
MAX_USELESS_ASKS = 40
"""After so many asks in a row without a new config the order of the model decides."""


class Proposals(Protocol):
    """Proposes configs and learns from their scores."""

    @property
    def size(self) -> int:
        """How many configs there are to propose and recall, together."""

    def recall(self, config: KernelConfig, score: float | None) -> None:
        """An earlier run tried this config, with this score; it is not proposed again."""

    def propose(self) -> KernelConfig | None:
        """A config that was not proposed before, to be compiled, or None when there is none left."""

    def pick(self, ready: Mapping[KernelConfig, float | None]) -> KernelConfig:
        """Which of the proposed configs is measured next, among those that are compiled: by config, in the order in
        which they were proposed, the time that the model predicts from the compiled code, if it can."""

    def tell(self, config: KernelConfig, score: float | None) -> None:
        """How a proposed config did: lower is better, None means that it cannot run."""


class Enumeration:
    """Every config once, in a given order."""

    def __init__(self, order: Iterable[KernelConfig]):
        self._order = deque(order)
        self.size = len(self._order)

    def recall(self, config: KernelConfig, score: float | None) -> None:
        if config in self._order:
            self._order.remove(config)

    def propose(self) -> KernelConfig | None:
        return self._order.popleft() if self._order else None

    def pick(self, ready: Mapping[KernelConfig, float | None]) -> KernelConfig:
        return next(iter(ready))

    def tell(self, config: KernelConfig, score: float | None) -> None:
        """The order is fixed."""


class TpeProposals:
    """The first `startup` configs of `order`, then what TPE proposes; never a config twice.

    `constant_liar` keeps proposals apart while the scores of earlier ones are still outstanding.
    """

    def __init__(self, space: SearchSpace, order: Sequence[KernelConfig], *, startup: int, seed: int):
        self.size = len(order)
        self._feasible = {_identity(config.kernel, config.parameters): config for config in space.feasible}
        self._kernels = tuple(dict.fromkeys(config.kernel for config in space.feasible))
        self._choices = {name: space.choices(name) for name in space.parameter_names}
        self._names = {
            config.kernel: tuple(config.parameters) for config in reversed(space.feasible)
        }  # the parameters of each kernel
        self._order = deque(order)
        self._startup = startup
        self._proposed: set[KernelConfig] = set()
        self._open: dict[KernelConfig, Any] = {}
        self._study = _new_study(startup, seed)

    def recall(self, config: KernelConfig, score: float | None) -> None:
        if config in self._feasible.values():
            self._propose_exactly(config)
            self.tell(config, score)

    def propose(self) -> KernelConfig | None:
        if len(self._proposed) >= self._startup:
            config = self._sample()
            if config is not None:
                return config
        return self._next_in_order()

    def pick(self, ready: Mapping[KernelConfig, float | None]) -> KernelConfig:
        return by_prediction(ready)

    def tell(self, config: KernelConfig, score: float | None) -> None:
        from optuna.trial import TrialState

        trial = self._open.pop(config)
        if score is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, math.log(score))

    def _next_in_order(self) -> KernelConfig | None:
        while self._order:
            config = self._order.popleft()
            if config not in self._proposed:
                return self._propose_exactly(config)
        return None

    def _propose_exactly(self, config: KernelConfig) -> KernelConfig:
        self._study.enqueue_trial(self._encode(config))
        return self._accept(config, self._ask()[1])

    def _sample(self) -> KernelConfig | None:
        from optuna.trial import TrialState

        for _ in range(MAX_USELESS_ASKS):
            config, trial = self._ask()
            if config is not None and config not in self._proposed:
                return self._accept(config, trial)
            self._study.tell(trial, state=TrialState.PRUNED)
        return None

    def _accept(self, config: KernelConfig, trial: Any) -> KernelConfig:
        self._proposed.add(config)
        self._open[config] = trial
        return config

    def _ask(self) -> tuple[KernelConfig | None, Any]:
        """A feasible config, or None for a point that is none, and its trial."""
        trial = self._study.ask()
        kernel = trial.suggest_categorical("kernel", self._kernels)
        values = {
            name: choices[trial.suggest_int(name, 0, len(choices) - 1)] for name, choices in self._choices.items()
        }
        return self._feasible.get(_identity(kernel, {name: values[name] for name in self._names[kernel]})), trial

    def _encode(self, config: KernelConfig) -> dict[str, Any]:
        ranks = {
            name: choices.index(config.parameters.get(name, choices[0])) for name, choices in self._choices.items()
        }
        return {"kernel": config.kernel} | ranks


def by_prediction(ready: Mapping[KernelConfig, float | None]) -> KernelConfig:
    """The config with the shortest predicted time, the first of equals."""
    return min(ready, key=lambda config: ready[config] or 0.0)


def _identity(kernel: str, parameters: Mapping[str, int]) -> tuple[Any, ...]:
    return kernel, *parameters.items()


def _new_study(startup: int, seed: int) -> Any:
    import warnings

    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Optuna 4 calls both options experimental; they are the defaults of Optuna 5.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True, n_startup_trials=startup, seed=seed)
    return optuna.create_study(direction="minimize", sampler=sampler)
