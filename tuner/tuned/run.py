"""One tuning run of a user's own function: what is known, the search, the finals, and what is stored of them.

Proposals, child process, timing and verdict are those of our own kernels, which ask of configs and shapes no more than
the values here have.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktune.db.records.records import Environment, Outcome
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.user_store import UserKernelStore
from blocktune.kernels.hardware.device import DeviceSpec, present_devices
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.tuned.function import TunedFunction
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.measure.device_choice import is_present
from blocktune.tuner.measure.environment import measuring_environment, predicting_environment
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.measure.runner import GpuRunner, Runner
from blocktune.tuner.measure.telemetry import GpuMonitor, gpu_lock
from blocktune.tuner.search.finals import Result, hold_finals, interrupted_verdict
from blocktune.tuner.search.loop import Limit
from blocktune.tuner.search.proposals import Enumeration, Proposals
from blocktune.tuner.tuned.arguments import save_arguments

OnTrial = Callable[[UserTrial], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReport:
    """The end of a run. best: as stored. reason: why this config won. outcomes: all trials of the problem by outcome,
    `resumed` of them from earlier runs. feasible and dropped: configs that fulfil the constraints, and those that do
    not. interrupted: ended early by the user; every trial until then is kept."""

    best: UserBest
    reason: str
    outcomes: Mapping[Outcome, int]
    resumed: int
    feasible: int
    dropped: int
    seconds: float
    interrupted: bool


@dataclass(frozen=True, slots=True)
class UserSpace:
    """The configs of a function that can run a call, as proposals ask for them."""

    feasible: tuple[UserConfig, ...]

    def choices(self, name: str) -> tuple[int, ...]:
        """The values of one parameter, ascending."""
        return tuple(sorted({config.parameters[name] for config in self.feasible}))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(self.feasible[0].parameters)


@dataclass(frozen=True, slots=True)
class UserContenders:
    """Who takes part in the finals, as `hold_finals` asks for them; there is no paper for a user's own function."""

    space: UserSpace
    default: UserConfig
    paper: None = None

    @property
    def untuned(self) -> UserConfig:
        """What calls get without tuning."""
        return self.default


@dataclass(frozen=True, slots=True)
class _Subject:
    """What the child process sets up; a runner asks for no more of a shape."""

    label: str
    document: Mapping[str, Any]

    def to_json(self) -> Mapping[str, Any]:
        return self.document


class UserRun:
    """One call of one function on one device, with the store's knowledge of it."""

    def __init__(
        self,
        function: TunedFunction,
        arguments: Mapping[str, Any],
        device: DeviceSpec,
        store: UserKernelStore,
        on_trial: OnTrial,
    ) -> None:
        self._started = time.monotonic()
        self._function, self._arguments, self._store, self._on_trial = function, arguments, store, on_trial
        self._device = device
        self._present = is_present(device)
        self._monitor = GpuMonitor(device.uuid if self._present else None, own_processes=1)
        self._environment: Environment = (
            measuring_environment(device, self._monitor) if self._present else predicting_environment(device)
        )
        self._problem = Problem.of(arguments)
        self._contenders: Any = _contenders(function, arguments, self._problem)
        known = store.trials(device, function.name, function.source_hash, self._problem, self._environment)
        self._trials = {trial.config: trial for trial in known}
        self._resumed = len(self._trials)
        self._interrupted = False

    def known_report(self, limit: Limit) -> UserReport | None:
        """The stored winner, if an earlier run with this software came to its end and there is nothing more to try."""
        best = self._best_stored()
        if best is None or best.trials != len(self._trials):
            return None
        everything = self._trials.keys() >= set(self._contenders.space.feasible)
        enough = len(self._trials) >= limit.trials
        return self._report(best, "found by an earlier run") if everything or enough else None

    def execute(self, limit: Limit, seed: int, command: Sequence[str]) -> UserReport:
        with self._runner(command) as runner:
            try:
                self._search(runner, limit, seed)
                self._require_result()
                result = hold_finals(runner, self._all, self._contenders, self._incumbent())
            except KeyboardInterrupt:
                if not any(trial.outcome is Outcome.OK for trial in self._all):
                    raise
                self._interrupted = True
                result = interrupted_verdict(self._all, self._contenders.default)
        for config, failure in result.failures.items():
            self._keep(config, failure)
        return self._concluded(result)

    @property
    def _all(self) -> list[Any]:
        return list(self._trials.values())

    def _search(self, runner: Runner, limit: Limit, seed: int) -> None:
        """Measures what is proposed until a bound is met or nothing is left."""
        proposals = self._proposals(limit.trials, seed)
        for trial in self._all:
            proposals.recall(trial.config, trial.relative_to_anchor)
        deadline = time.monotonic() + limit.seconds
        while len(self._trials) < limit.trials and (not self._trials or time.monotonic() < deadline):
            config: Any = proposals.propose()
            if config is None:
                return
            proposals.tell(config, self._keep(config, runner.measure(config)).relative_to_anchor)

    def _proposals(self, trials: int, seed: int) -> Proposals:
        """Return every config if the budget covers them, else what TPE makes of those so far.

        Nothing is known of a user's function, so the order is the default first, then that of the choices.
        """
        space, default = self._contenders.space, self._contenders.default
        order: Any = list(dict.fromkeys((default, *space.feasible)))
        if len(order) <= trials:
            return Enumeration(order)
        from blocktune.tuner.sampling.study_storage import open_study
        from blocktune.tuner.search.studies import sampled_by_tpe, startup_of

        return sampled_by_tpe(open_study(self._function.name), space, order, startup_of(trials), seed)

    def _keep(self, config: Any, measured: Measurement) -> UserTrial:
        """Stores how a candidate ended before anything else happens."""
        trial = UserTrial(
            device=self._device,
            environment=self._environment,
            problem=self._problem,
            config=config,
            source_hash=self._function.source_hash,
            outcome=measured.outcome,
            time_us=measured.time_us,
            relative_to_anchor=measured.relative_to_anchor,
            samples_us=measured.samples_us,
            error=measured.error,
            seconds=measured.seconds,
        )
        self._store.record(trial)
        self._trials[config] = trial
        self._on_trial(trial)
        return trial

    def _require_result(self) -> None:
        if any(trial.outcome is Outcome.OK for trial in self._all):
            return
        counts = Counter(trial.outcome for trial in self._all).most_common()
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts)
        example = next(trial for trial in self._all if trial.outcome is counts[0][0])
        raise NoFeasibleConfigError(
            f"At least one config of {self._function.name} must run and be right for {self._problem.label}, but of "
            f"{len(self._all)} tried: {told}. For example {example.config.label}: {example.error} Correct the "
            "function, or add choices."
        )

    def _concluded(self, result: Result) -> UserReport:
        verdict, times = result.verdict, result.times_us
        winner: Any = verdict.winner
        default = self._contenders.default
        best = UserBest(
            device=self._device,
            environment=self._environment,
            problem=self._problem,
            config=winner,
            source_hash=self._function.source_hash,
            time_us=times[winner],
            default=default,
            default_time_us=times.get(default),
            speedup_over_default=verdict.speedup.median if verdict.speedup else None,
            speedup_low=verdict.speedup.low if verdict.speedup else None,
            speedup_high=verdict.speedup.high if verdict.speedup else None,
            trials=len(self._trials),
        )
        if not self._interrupted or self._best_stored() is None:  # what won finals stays
            self._store.set_best(best)
        return self._report(best, verdict.reason)

    def _report(self, best: UserBest, reason: str) -> UserReport:
        feasible = len(self._contenders.space.feasible)
        return UserReport(
            best=best,
            reason=reason,
            outcomes=Counter(trial.outcome for trial in self._all),
            resumed=self._resumed,
            feasible=feasible,
            dropped=len(self._function.choices.all) - feasible,
            seconds=time.monotonic() - self._started,
            interrupted=self._interrupted,
        )

    def _best_stored(self) -> UserBest | None:
        """The stored winner, if it was measured with this software."""
        best = self._store.best(self._device, self._function.name, self._function.source_hash, self._problem)
        return best if best is not None and best.environment.digest == self._environment.digest else None

    def _incumbent(self) -> Any:
        best = self._best_stored()
        return None if best is None else best.config

    @contextlib.contextmanager
    def _runner(self, command: Sequence[str]) -> Iterator[GpuRunner]:
        """A runner of the child process, which gets the arguments through a private folder. The GPU is locked."""
        uuid = self._device.uuid if self._present else None
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if uuid is not None and len(present_devices()) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = uuid
        anchor: Any = next((trial.config for trial in self._all if trial.relative_to_anchor == 1.0), None)
        with (
            tempfile.TemporaryDirectory(prefix="blocktune-") as folder,
            gpu_lock(uuid, lambda message: None),
        ):
            document = save_arguments(self._arguments, Path(folder))
            document |= {"function": self._function.name, "source_hash": self._function.source_hash}
            subject: Any = _Subject(f"{self._function.name} {self._problem.label}", document)
            runner = GpuRunner(
                subject,
                anchor=anchor,
                environment=environment,
                command=command,
                monitor=self._monitor if uuid else None,
            )
            try:
                yield runner
            finally:
                runner.close()


def _contenders(function: TunedFunction, arguments: Mapping[str, Any], problem: Problem) -> UserContenders:
    choices = function.choices
    default = choices.default(arguments)
    if default is None:
        raise NoFeasibleConfigError(
            f"At least one config of {function.name} must fulfil its constraints ({', '.join(choices.constraints)}), "
            f"but none of {len(choices.all)} does for {problem.label}. Add choices; the reference serves such calls."
        )
    return UserContenders(UserSpace(choices.feasible(arguments)), default)
