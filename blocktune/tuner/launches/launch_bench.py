"""The bench of an autotuned call: its configs on its own arguments, checked against what the first of them computes."""

from collections.abc import Callable
from dataclasses import dataclass

from blocktune.kernels.base.kernel import Thunk
from blocktune.kernels.hardware.device import current_device
from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import UserConfig
from blocktune.runtime.autotuned.settings import Cache
from blocktune.tuner.launches.launches import ConfigLaunch, OwnLaunches, require_restorable, with_configs
from blocktune.tuner.launches.outputs import OutputCheck
from blocktune.tuner.measure.bench import Bench, Tell, WrongResultError
from blocktune.tuner.measure.clock import Clock, CudaClock
from blocktune.tuner.measure.energy import CudaQueue, EnergyMeter
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.telemetry import GpuMonitor


def cuda_meter() -> EnergyMeter:
    """Return what measures energies on the current GPU."""
    return EnergyMeter(CudaQueue(), GpuMonitor(current_device().uuid).energy_j)


@dataclass(frozen=True, slots=True)
class LaunchTools:
    """What measuring a call needs of the machine.

    make_clock: by the state of the L2 cache that a launch is to find. make_meter: None where no energy is measured.
    """

    make_clock: Callable[[Cache], Clock] = CudaClock
    make_meter: Callable[[], EnergyMeter | None] = cuda_meter


@dataclass(frozen=True, slots=True)
class LaunchCandidate:
    """A config of a call, whose results must be those of the config that was checked first."""

    call: Call
    config: UserConfig
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


class LaunchBench(Bench[UserConfig]):
    """Checks and times configs of a call, listed or not. Its arguments are as before after every check.

    Args:
        call: the call.
        tools: of the machine.
        terms: on which configs are measured.

    Raises:
        UsageError: an argument that measuring has to reset or restore is no tensor.
    """

    def __init__(self, call: Call, tools: LaunchTools, terms: Terms) -> None:
        require_restorable(call)
        self._call, clock = call, tools.make_clock(call.settings.l2)
        self._outputs: OutputCheck | None = None
        self.launches = OwnLaunches(call, lambda: clock)
        super().__init__(self._candidate, clock=clock, terms=terms, meter=tools.make_meter())

    def close(self) -> None:
        if self._outputs is not None:
            self._outputs.restore()

    def _candidate(self, config: UserConfig) -> LaunchCandidate:
        if self._outputs is None:  # whoever times only needs no memory for copies of the tensors
            self._outputs = OutputCheck(self._call)
        if config not in self._call.configs:
            self._call = with_configs(self._call, [config])
        return LaunchCandidate(self._call, config, self._outputs)
