"""The bench of an autotuned call: its configs on its own arguments, checked against what the first of them computes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.hardware.device import current_device
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.settings import Cache, brings_its_own_bench
from blocktune.tuner.launches.launches import (
    ConfigLaunch,
    require_restorable,
    whole_launch,
)
from blocktune.tuner.launches.outputs import OutputCheck
from blocktune.tuner.launches.race import Samples
from blocktune.tuner.measure.bench import Bench, Tell, WrongResultError
from blocktune.tuner.measure.clock import Clock, CudaClock
from blocktune.tuner.measure.energy import CudaQueue, EnergyMeter
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import HEAT_SECONDS, IDLE_SECONDS, column
from blocktune.tuner.measure.telemetry import GpuMonitor

_OF_THE_CONFIG = (
    "OutOfResources",
    "CompilationError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
    "PTXASError",
)
"""Errors that a config alone is to blame for, by name as in tuner/measure/worker.py. Others are the caller's."""


def cuda_meter() -> EnergyMeter:
    """Return what measures energies on the current GPU."""
    return EnergyMeter(CudaQueue(), GpuMonitor(current_device().uuid).energy_j)


@dataclass(frozen=True, slots=True)
class LaunchTools:
    """The parts of the machine that measuring a call needs.

    make_clock: by the state of the L2 cache that a launch is to find. make_meter: None where no energy is measured.
    """

    make_clock: Callable[[Cache], Clock] = CudaClock
    make_meter: Callable[[], EnergyMeter | None] = cuda_meter


@dataclass(frozen=True, slots=True)
class LaunchCandidate:
    """A call's config, whose results must equal those of the config that was checked first."""

    call: AutotunedCall
    config: LaunchConfig
    outputs: OutputCheck

    @property
    def run(self) -> Thunk:
        return ConfigLaunch(self.call, self.config)

    @property
    def anchor_run(self) -> Thunk:
        return self.run

    def check(self, tell: Tell | None = None) -> None:
        problem = self.outputs.problem(self.call, self.config, lambda: tell("running") if tell is not None else None)
        if problem is not None:
            raise WrongResultError(problem)

    def check_after_timing(self) -> None:
        self.check()

    def confirm(self, tell: Tell) -> None:
        self.check(tell)


class LaunchBench(Bench[LaunchConfig]):
    """Checks and times configs of a call, listed or not. Its arguments are as before after every check.

    failures: why configs that were to take turns do not run.

    Args:
        call: the call.
        tools: of the machine.
        terms: on which configs are measured.

    Raises:
        UsageError: an argument that measuring has to reset or restore is no tensor.
    """

    def __init__(self, call: AutotunedCall, tools: LaunchTools, terms: Terms) -> None:
        require_restorable(call)
        self._call = call
        self._outputs: OutputCheck | None = None
        self._ran: set[LaunchConfig] = set()
        self._benched_us: dict[LaunchConfig, Samples] = {}
        self.failures: dict[LaunchConfig, str] = {}
        super().__init__(
            self._candidate, clock=tools.make_clock(call.settings.l2), terms=terms, meter=tools.make_meter()
        )

    def rounds(self, configs: Sequence[LaunchConfig], count: int) -> Mapping[LaunchConfig, Samples]:
        """Return the times of configs that took turns, whatever they compute; those that do not run are left out and
        among `failures`. A `do_bench` that the kernel brings along times each for itself, and once.

        Raises:
            Exception: what a launch raised that is not to blame on its config.
        """
        running = [config for config in configs if config in self._ran or self._runs(config)]
        if brings_its_own_bench(self._call.tuner):
            return {config: self._benched(config) for config in running}
        launches = [ConfigLaunch(self._call, config) for config in running]
        if running and time.monotonic() - self._last_timed > IDLE_SECONDS:  # as while configs were compiled
            self._clock.heat(launches[0], HEAT_SECONDS)
        rows = self._clock.rounds(launches, count) if running else ()
        self._last_timed = time.monotonic()
        return {config: column(rows, place) for place, config in enumerate(running)}

    def _runs(self, config: LaunchConfig) -> bool:
        """Launch a config for the first time, which loads its code."""
        launch = ConfigLaunch(self._call, config)
        launch.before()
        try:
            launch()
            self.synchronize()
            self._last_timed = time.monotonic()
        except Exception as error:
            launch.after(exception=error)
            if type(error).__name__ not in _OF_THE_CONFIG:
                raise
            self.failures[config] = f"{type(error).__name__}: {error}"
            return False
        launch.after()
        self._ran.add(config)
        return True

    def _benched(self, config: LaunchConfig) -> Samples:
        if config not in self._benched_us:
            times_ms = self._call.tuner.do_bench(whole_launch(self._call, config), quantiles=(0.5, 0.2, 0.8))
            self._benched_us[config] = (1e3 * (times_ms[0] if isinstance(times_ms, Sequence) else times_ms),)
        return self._benched_us[config]

    def close(self) -> None:
        if self._outputs is not None:
            self._outputs.restore()

    def _candidate(self, config: LaunchConfig) -> LaunchCandidate:
        if self._outputs is None:  # whoever times only needs no memory for copies of the tensors
            self._outputs = OutputCheck(self._call)
        return LaunchCandidate(self._call, config, self._outputs)
