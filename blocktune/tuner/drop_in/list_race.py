"""The race of a call's list: leave out what cannot run or win, time the rest in turns."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from blocktune.db.records.records import KernelBest, KernelTrial, Outcome, Telemetry
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import Origin
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.settings import brings_its_own_bench
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.launches.launch_runner import LaunchRunner
from blocktune.tuner.launches.launches import ConfigLaunch
from blocktune.tuner.launches.race import Standing, fastest, race
from blocktune.tuner.measure.telemetry import disturbance
from blocktune.tuner.subject.launch import LaunchSubject

KNOWN_MARGIN = 1.05
"""Configs that were within this of the best one in an earlier run race against new ones."""

Compiles = Mapping[LaunchConfig, Compiled | None]
"""How configs compiled; None where that is not known."""


class ListRace:
    """The race among the new configs of a list and the best known ones.

    trials: how the new configs ended. failed_by_machine: those of them that may do well later.

    Args:
        subject: the call.
        known: how configs ended in earlier runs.
    """

    def __init__(self, subject: LaunchSubject, known: Mapping[LaunchConfig, KernelTrial]) -> None:
        self._subject, self._list = subject, tuple(subject.call.configs)
        self._known = {config: trial for config, trial in known.items() if config in self._list}
        self.trials: dict[LaunchConfig, KernelTrial] = {}
        self.failed_by_machine: set[LaunchConfig] = set()
        self._resources: dict[LaunchConfig, KernelResources] = {}

    @property
    def new(self) -> list[LaunchConfig]:
        """The configs of the list that were never tried."""
        return [config for config in self._list if config not in self._known]

    @property
    def reasons(self) -> dict[str, str]:
        """Why configs were not measured or failed, by their label, those of earlier runs included."""
        return reasons_of({**self._known, **self.trials})

    def run(
        self,
        compiled: Compiles,
        open_runner: Callable[[], AbstractContextManager[LaunchRunner]],
        sample: Callable[[], Telemetry],
    ) -> Standing | None:
        """Return the end of the race; None if no config runs.

        Args:
            compiled: how the new configs compiled.
            open_runner: opens what times launches.
            sample: returns the state of the GPU.
        """
        best_known = self._best_known()
        runnable = {config: compiled[config] for config in self.new if self._can_run(config, compiled[config])}
        refused = self._refused()
        twins = self._twins(self._without_spills(runnable, is_only_choice=not best_known))
        racing = {*best_known, *refused, *(config for config, twin in twins.items() if config == twin)}
        contenders = [config for config in self._list if config in racing]
        if len(contenders) == 1 and contenders[0] in self._known:
            return Standing(contenders[0], {contenders[0]: self._known[contenders[0]].samples_us})
        with open_runner() as runner:
            self._tell_failures()
            find = fastest if brings_its_own_bench(self._subject.call.tuner) else race
            standing = find(contenders, runner.rounds)
            self._keep_failures(runner.failures)
            if standing is not None:
                self._keep_times(standing, sample())
                runner.prepare_launch(standing.winner)
        self._keep_twins(twins)
        return standing

    def best(self, standing: Standing) -> KernelBest:
        """Return the winner as the store has it."""
        default, winner = self._subject.contenders.default, standing.winner
        time_us = standing.time_us(winner)
        default_us = standing.time_us(default) if default in standing.samples_us else None
        return self._subject.best(
            self.trial(winner),
            Origin.MEASURED,
            len(self._list),
            time_us=time_us,
            default_time_us=default_us,
            speedup_over_default=default_us / time_us if default_us and time_us else None,
        )

    def trial(self, config: LaunchConfig) -> KernelTrial:
        """Return how a config ended, here or in an earlier run."""
        return self.trials.get(config) or self._known[config]

    def _best_known(self) -> tuple[LaunchConfig, ...]:
        """Return the configs that were the fastest in earlier runs, or nearly."""
        times = {config: trial.time_us for config, trial in self._known.items() if trial.time_us is not None}
        return tuple(config for config, time_us in times.items() if time_us <= KNOWN_MARGIN * min(times.values()))

    def _can_run(self, config: LaunchConfig, compiled: Compiled | None) -> bool:
        """Return whether a config compiled and fits the device, as far as that is known."""
        if compiled is None:
            return True
        outcome, error = compiled.outcome, compiled.error
        if compiled.resources is not None:
            self._resources[config] = compiled.resources
            error = self._subject.misfit(self._subject.occupancy(compiled.resources)) or ""
            outcome = Outcome.INFEASIBLE if error else outcome
        if outcome is Outcome.OK:
            return True
        self._keep(config, outcome, error=error, compile_seconds=compiled.seconds)
        if compiled.transient:
            self.failed_by_machine.add(config)
        return False

    def _refused(self) -> list[LaunchConfig]:
        """Return the configs to launch although they do not fit, for a hook that is to see the error."""
        if not self._has_listening_hook:
            return []
        return [config for config, trial in self.trials.items() if trial.outcome is Outcome.INFEASIBLE]

    @property
    def _has_listening_hook(self) -> bool:
        """Whether the author's hook is to see why configs fail."""
        return self._subject.call.tuner.user_defined_post_hook and not self._subject.call.settings.isolate

    def _tell_failures(self) -> None:
        """Call the hooks of configs that do not compile, as a launch would: to compile them again may crash here."""
        if self._has_listening_hook:
            for config, trial in self.trials.items():
                if trial.outcome in (Outcome.COMPILE_ERROR, Outcome.COMPILE_TIMEOUT):
                    launch = ConfigLaunch(self._subject.call, config)
                    launch.before()
                    launch.after(exception=RuntimeError(trial.error))

    def _without_spills(self, runnable: Compiles, *, is_only_choice: bool) -> Compiles:
        """Return the configs that spill no more than the settings allow; all of them if all spill more, and nothing
        else is known."""
        spills = {
            config: reason
            for config, compiled in runnable.items()
            if compiled is not None and compiled.resources is not None
            if (reason := self._subject.spill(compiled.resources)) is not None
        }
        if len(spills) == len(runnable) and is_only_choice:
            return runnable
        for config, reason in spills.items():
            self._keep(config, Outcome.INFEASIBLE, error=reason)
        return {config: compiled for config, compiled in runnable.items() if config not in spills}

    def _twins(self, runnable: Compiles) -> dict[LaunchConfig, LaunchConfig]:
        """Return for each config the first one that launches equal code in an equal way, which stands for it."""
        resources = {config: compiled.resources if compiled else None for config, compiled in runnable.items()}
        twins: dict[LaunchConfig, LaunchConfig] = {}
        for config, own in resources.items():
            distinct = (other for other, twin in twins.items() if other == twin)
            same = (other for other in distinct if self._subject.are_twins(config, own, other, resources[other]))
            twins[config] = next(same, config)
        return twins

    def _keep(self, config: LaunchConfig, outcome: Outcome, **fields: object) -> None:
        known = self._known.get(config)
        resources = self._resources.get(config, known.resources if known else None)
        self.trials[config] = self._subject.trial(config, outcome, resources=resources, **fields)

    def _keep_failures(self, failures: Mapping[LaunchConfig, str]) -> None:
        for config, error in failures.items():
            self._keep(config, Outcome.RUN_ERROR, error=error)

    def _keep_times(self, standing: Standing, state: Telemetry) -> None:
        for config, samples in standing.samples_us.items():
            fields = {"time_us": standing.time_us(config), "samples_us": samples, "error": disturbance(state)}
            self._keep(config, Outcome.OK, **fields, telemetry=state)

    def _keep_twins(self, twins: Mapping[LaunchConfig, LaunchConfig]) -> None:
        """Note how configs ended for which another one was timed."""
        for config, twin in twins.items():
            if config != twin:
                timed = self.trials[twin]
                same = f"measured as {twin.label}, whose code is the same"
                fields = {"time_us": timed.time_us, "samples_us": timed.samples_us, "telemetry": timed.telemetry}
                self._keep(config, timed.outcome, error=same if timed.time_us is not None else timed.error, **fields)


def reasons_of(trials: Mapping[LaunchConfig, KernelTrial]) -> dict[str, str]:
    """Return why configs have no time, by their label."""
    failed = (trial for trial in trials.values() if trial.outcome is not Outcome.OK)
    return {trial.config.label: f"{trial.outcome}: {trial.error}" for trial in failed}
