"""The measuring of a call: compile what is new, drop what cannot win, race the rest."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import Origin
from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.drop_in.compiles import compiles
from blocktune.tuner.drop_in.known import choice_of
from blocktune.tuner.drop_in.results import Ending
from blocktune.tuner.jitted.compile_ahead import CompileAhead
from blocktune.tuner.launches.isolated import IsolatedLaunches
from blocktune.tuner.launches.launches import BenchedLaunches, OwnLaunches, brings_its_own_bench
from blocktune.tuner.launches.race import Standing, race
from blocktune.tuner.measure.clock import Clock
from blocktune.tuner.measure.telemetry import GpuMonitor, disturbance
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.subject.costs import rates_of

KNOWN_MARGIN = 1.05
"""Configs that were within this of the best one in an earlier run race against new ones."""


class Measuring:
    """The measuring of one call.

    Args:
        call: the call.
        device: the GPU.
        known: how configs ended in earlier runs.
        compiler: compiles ahead.
        isolated_command: starts the process that measures where `isolate` is set.
        compiled: how compiles of the list have ended; what is missing is compiled.
        monitor: of the GPU's state.
    """

    def __init__(
        self,
        call: Call,
        device: DeviceSpec,
        known: Mapping[UserConfig, Ending],
        compiler: CompileAhead,
        isolated_command: Sequence[str],
        compiled: Mapping[UserConfig, Compiled | None],
        monitor: GpuMonitor,
    ) -> None:
        self._isolated_command, self._ready, self._monitor = isolated_command, compiled, monitor
        self._call, self._device, self._known, self._compiler = call, device, known, compiler
        self.endings: dict[UserConfig, Ending] = {}
        self._twins: dict[UserConfig, UserConfig] = {}
        self._of_code: dict[tuple[object, ...], UserConfig] = {}

    def run(self, make_clock: Callable[[], Clock], alone: AbstractContextManager[None]) -> Standing | None:
        """Return the end of the race among new configs and the best known ones; None if no config runs.

        Args:
            make_clock: of the GPU.
            alone: held while launches are timed, so that no other process disturbs them.
        """
        new = [config for config in self._call.configs if config not in self._known]
        runnable = self._distinct(self._compiled(new))
        contenders = [config for config in self._call.configs if config in (*self._best_known, *runnable)]
        if len(contenders) == 1 and contenders[0] in self._known:
            return Standing(contenders[0], {contenders[0]: self._known[contenders[0]].samples_us})
        with alone:
            return self._raced(contenders, self._launches(make_clock))

    def _raced(self, contenders: Sequence[UserConfig], launches: "OwnLaunches | IsolatedLaunches") -> Standing | None:
        standing = race(contenders, launches.rounds)
        self._keep(standing, launches.failures)
        launches.close(self._call.default if standing is None else standing.winner)
        return standing

    def _launches(self, make_clock: Callable[[], Clock]) -> "OwnLaunches | IsolatedLaunches":
        """Return what times the configs of this call."""
        if self._call.settings.isolate:
            return IsolatedLaunches(self._call, self._isolated_command)
        make = BenchedLaunches if brings_its_own_bench(self._call) else OwnLaunches
        return make(self._call, make_clock)

    def choice(self, standing: Standing, seconds: float) -> KernelExplanation:
        """Return the choice of the winner, as this process has measured it."""
        call, default = self._call, self._call.default
        winner, time_us = standing.winner, standing.time_us(standing.winner)
        candidate = Candidate(
            rung=Rung.EXACT, config=winner, origin=Origin.MEASURED, tuned_for=call.problem, time_us=time_us
        )
        return replace(
            choice_of(call, candidate, self._device),
            rates=rates_of(call, winner, time_us, self._device),
            default_time_us=standing.time_us(default) if default in standing.samples_us else None,
            tuned=True,
            seconds=seconds,
            dropped=self.reasons,
            times_us={config: standing.time_us(config) for config in standing.samples_us},
        )

    @property
    def reasons(self) -> dict[str, str]:
        """Why configs were not measured or failed, by their label, those of earlier runs included."""
        everything = {**self._known, **self.endings}
        return {
            config.label: f"{ending.outcome}: {ending.error}"
            for config, ending in everything.items()
            if ending.outcome is not Outcome.OK and config in self._call.configs
        }

    @property
    def _best_known(self) -> tuple[UserConfig, ...]:
        """Configs of the list that were the fastest in earlier runs, or nearly."""
        times = {
            config: ending.time_us
            for config, ending in self._known.items()
            if config in self._call.configs and ending.time_us is not None
        }
        return tuple(config for config, time_us in times.items() if time_us <= KNOWN_MARGIN * min(times.values()))

    def _compiled(self, configs: Sequence[UserConfig]) -> dict[UserConfig, Compiled | None]:
        """Return the configs that can run, with what they compiled to; None where that is not known."""
        missing = [config for config in configs if config not in self._ready]
        ended = {**self._ready, **compiles(self._call, missing, self._device.limits.cc, self._compiler)}
        for config in configs:
            self._drop_if_it_cannot_run(config, ended[config])
        runnable = {config: ended[config] for config in configs if config not in self.endings}
        return self._without_spills(runnable)

    def _drop_if_it_cannot_run(self, config: UserConfig, compiled: Compiled | None) -> None:
        if compiled is None:
            return
        if compiled.outcome is not Outcome.OK:
            self.endings[config] = Ending(
                compiled.outcome, error=compiled.error, seconds=compiled.seconds, transient=compiled.transient
            )
        elif compiled.resources is not None:
            found = occupancy(compiled.resources, self._device.limits)
            if not found.blocks_per_sm:
                limits = ", ".join(str(name) for name in found.binding)
                error = f"no block fits a multiprocessor: {limits}"
                self.endings[config] = Ending(Outcome.INFEASIBLE, error=error, seconds=compiled.seconds)

    def _without_spills(self, runnable: dict[UserConfig, Compiled | None]) -> dict[UserConfig, Compiled | None]:
        """Return the configs that spill no more than the settings allow; all of them if all spill more."""
        bound = self._call.settings.max_spill_bytes
        spills = {
            config: compiled.resources.spill_bytes
            for config, compiled in runnable.items()
            if compiled is not None and compiled.resources is not None and compiled.resources.spill_bytes > bound
        }
        if len(spills) == len(runnable) and not self._best_known:
            return runnable
        for config, bytes_ in spills.items():
            error = f"a thread spills {bytes_} bytes, of which {bound} are allowed (max_spill_bytes)"
            self.endings[config] = Ending(Outcome.INFEASIBLE, error=error)
        return {config: compiled for config, compiled in runnable.items() if config not in spills}

    def _distinct(self, runnable: Mapping[UserConfig, Compiled | None]) -> list[UserConfig]:
        """Return one config of those that launch equal code in an equal way, since it stands for all; none where one
        of them was measured before."""
        distinct = []
        for config, compiled in runnable.items():
            meta = tuple(sorted(self._call.configs[config].kwargs.items(), key=lambda pair: pair[0]))
            resources = None if compiled is None else compiled.resources
            code = (config,) if resources is None or not resources.code_sha256 else (resources, *meta)
            twin = self._of_code.setdefault(code, config)
            if twin == config:
                distinct.append(config)
            else:
                self._twins[config] = twin
        return distinct

    def _keep(self, standing: Standing | None, failures: Mapping[UserConfig, str]) -> None:
        """Note how the configs ended that were raced, and those that they stood for."""
        for config, error in failures.items():
            self.endings[config] = Ending(Outcome.RUN_ERROR, error=error)
        state = self._monitor.sample()
        for config, samples in (standing.samples_us if standing is not None else {}).items():
            assert standing is not None
            self.endings[config] = Ending(
                Outcome.OK, standing.time_us(config), samples, disturbance(state), telemetry=state
            )
        for config, twin in self._twins.items():
            ending = self.endings.get(twin, Ending(Outcome.RUN_ERROR, error=f"as {twin.label}"))
            same = f"measured as {twin.label}, whose code is the same"
            self.endings[config] = replace(ending, error=same if ending.time_us is not None else ending.error)
