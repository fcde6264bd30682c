"""Proposals for a search from an Optuna study: it asks for configs, tells how they did, and keeps known results.

What `tune run` knows of a config is in its trial: its parameters, its score as the value, the median after every round
as intermediate values, and resources, occupancy and prediction as user attributes. A config that cannot run is a pruned
trial that violates the constraint `runs`. So is a point that a sampler suggests although it is no feasible config; it
costs a few milliseconds, as it is neither compiled nor measured.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeAlias

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from blocktune.db.records.records import AnyTrial, ConfigT
from blocktune.tuner.measure.protocol import stopped_early
from blocktune.tuner.sampling.parameters import Parameters
from blocktune.tuner.sampling.trial_facts import medians, user_attributes

RUNS = "runs"
"""The constraint of a trial: above 0 where its config cannot run."""

MAX_USELESS_ASKS = 4
"""Asks in a row without a new config after which the order decides. Each stays in the study, where it costs every later
ask of a sampler time."""

Ready: TypeAlias = Mapping[ConfigT, float | None]
Pick: TypeAlias = Callable[[Mapping[ConfigT, float | None]], ConfigT]


class StudyProposals(Generic[ConfigT]):
    """Proposes what a study asks for; never a config twice. See `Proposals`.

    Args:
        study: with its sampler and its pruner. Finished trials in it count as tried; what an earlier process left
            running is given up.
        parameters: of the configs that may be proposed.
        first: proposed before all else, in this order.
        order: proposed then, up to the startup, and where the sampler finds nothing new.
        startup: configs that are tried before the sampler proposes any. None leaves everything to the order.
        pick: which of those that are compiled is measured; None is the first proposed.
    """

    def __init__(
        self,
        study: Study,
        parameters: Parameters[ConfigT],
        *,
        first: Iterable[ConfigT] = (),
        order: Iterable[ConfigT] | None = None,
        startup: int | None = 0,
        pick: Pick[ConfigT] | None = None,
    ) -> None:
        self.study = study
        self.size = len(parameters.configs)
        self._parameters = parameters
        self._first = deque(first)
        self._order = deque(parameters.configs if order is None else order)
        self._startup = self.size if startup is None else startup
        self._pick = pick
        self._open: dict[ConfigT, optuna.Trial] = {}
        self._proposed = self._resume()

    def recall(self, config: ConfigT, score: float | None, trial: AnyTrial | None = None) -> None:
        """Record that an earlier run tried this config; a study that knows it already gets no second trial of it."""
        if config in self._proposed or config not in self._parameters.configs:
            return
        self._proposed.add(config)
        self.study.add_trial(self._finished_trial(config, score, trial))

    def propose(self) -> ConfigT | None:
        if (config := self._next_of(self._first)) is not None:
            return self._propose_exactly(config)
        if len(self._proposed) >= self.size:
            return None
        if len(self._proposed) >= self._startup and (config := self._sample()) is not None:
            return config
        config = self._next_of(self._order)
        return None if config is None else self._propose_exactly(config)

    def pick(self, ready: Ready[ConfigT]) -> ConfigT:
        return next(iter(ready)) if self._pick is None else self._pick(ready)

    def tell(self, config: ConfigT, score: float | None, trial: AnyTrial | None = None) -> None:
        asked = self._open.pop(config)
        for name, value in ({} if trial is None else user_attributes(trial)).items():
            asked.set_user_attr(name, value)
        asked.set_constraint(RUNS, float(score is None))
        for step, median in ({} if trial is None else medians(trial, score)).items():
            asked.report(median, step)
        if score is None or asked.should_prune():
            self._tell(asked, state=TrialState.PRUNED)
        else:
            self._tell(asked, score)

    def close(self) -> None:
        """Give up what was proposed and never tried, so that another search of this study may ask for it."""
        for trial in self._open.values():
            self.study.tell(trial, state=TrialState.FAIL)
        self._open.clear()

    def _resume(self) -> set[ConfigT]:
        """Return the configs that the study has tried; what is still running there has no process any more."""
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
        tried = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        return {config for trial in tried if (config := self._parameters.config(trial.params)) is not None}

    def _next_of(self, configs: deque[ConfigT]) -> ConfigT | None:
        """Return the next that was not proposed."""
        while configs:
            config = configs.popleft()
            if config not in self._proposed:
                return config
        return None

    def _propose_exactly(self, config: ConfigT) -> ConfigT | None:
        self.study.enqueue_trial(self._parameters.point(config))
        return self._sample()

    def _sample(self) -> ConfigT | None:
        """Return a new config of the study's: the one that a user enqueued, else the one that the sampler proposes."""
        for _ in range(MAX_USELESS_ASKS):
            trial = self.study.ask()
            config = self._parameters.suggest(trial)
            if config is not None and config not in self._proposed:
                self._proposed.add(config)
                self._open[config] = trial
                return config
            trial.set_constraint(RUNS, float(config is None))
            self._tell(trial, state=TrialState.PRUNED)
        return None

    def _tell(self, trial: optuna.Trial, value: float | None = None, state: TrialState | None = None) -> None:
        """End a trial. A sampler that has no use for constraints warns of each; the space keeps the rules anyway."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Constraints have been set")
            self.study.tell(trial, value, state)

    def _finished_trial(self, config: ConfigT, score: float | None, trial: AnyTrial | None) -> FrozenTrial:
        """Return a trial of an earlier run, as this study would have kept it."""
        stopped = trial is not None and stopped_early(trial.samples_us)
        return create_trial(
            params=self._parameters.point(config),
            distributions=self._parameters.own(config),
            value=score,
            state=TrialState.PRUNED if score is None or stopped else TrialState.COMPLETE,
            user_attrs={} if trial is None else user_attributes(trial),
            intermediate_values={} if trial is None else medians(trial, score),
            constraints={RUNS: float(score is None)},
        )
