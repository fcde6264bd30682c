"""A call of an autotuned kernel as a subject: its list of configs, its source, and what is known of its costs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blocktune.db.records.records import Environment, KernelTrial
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import LAUNCH_OPTIONS, KernelProblem, LaunchConfig
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.candidates.space import ConfigSpace
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.launches.saved_call import meta_of
from blocktune.tuner.occupancy.calculator import Occupancy
from blocktune.tuner.occupancy.waves import Waves
from blocktune.tuner.subject.costs import author_costs, costs_of
from blocktune.tuner.subject.subject import Subject

AT_THE_LIMIT = 1.03
"""A search beyond the list ends at a config that takes no more than this times the least that the device needs."""

LEAST_LAUNCH_US = 1.0
"""No launch takes less, however little it moves."""


@dataclass(frozen=True, kw_only=True)
class LaunchSubject(Subject[KernelProblem, LaunchConfig]):
    """A call, whose configs are searched on its own arguments. The first config of the list is the default.

    The only model is a roofline, and only where the author says by `costs` what a launch moves and computes: else
    the measurements alone guide a search.
    """

    device: DeviceSpec
    environment: Environment
    call: AutotunedCall
    contenders: Contenders[LaunchConfig]

    @classmethod
    def of(cls, call: AutotunedCall, device: DeviceSpec, environment: Environment) -> "LaunchSubject":
        """Return the subject of a call, whose list is the space."""
        first = call.default
        contenders = Contenders(space=ConfigSpace(feasible=tuple(call.configs)), expected=(first,), default=first)
        return cls(device=device, environment=environment, call=call, contenders=contenders)

    @property
    def problem(self) -> KernelProblem:
        return KernelProblem(self.call.name, self.call.sized_problem)

    @property
    def winner_problem(self) -> KernelProblem:
        return KernelProblem(self.call.name, self.call.listed_problem)

    @property
    def kernel_hash(self) -> str:
        return self.call.source_hash

    @property
    def label(self) -> str:
        return f"{self.call.name} {self.call.problem.label}"

    @property
    def meanwhile(self) -> str:
        return "calls take the first config of the list meanwhile"

    @property
    def keeps_partial_winner(self) -> bool:
        """Never: a call takes any stored winner of its list for the end of a search."""
        return False

    def source_hash(self, config: LaunchConfig) -> str | None:
        """Return the kernel's source, for configs of no list only where the search goes beyond it."""
        is_searched = config in self.call.configs or self.call.settings.expand
        return self.call.source_hash if is_searched and config.kernel == self.call.name else None

    def usefulness(self, config: LaunchConfig) -> float:
        return self._least_us(config) or 1.0

    def predict(self, compiled: CompileResult[LaunchConfig]) -> float | None:
        """Return the roofline's time over the share of the device that the blocks of the launch fill."""
        config, resources = compiled.config, compiled.resources
        least_us = self._least_us(config)
        if least_us is None or resources is None:
            return None
        blocks = math.prod(self.call.grid(meta_of(self.call, self.call.launched(config).all_kwargs())))
        resident = self.occupancy(resources).blocks_per_sm * self.device.num_sms
        return least_us / Waves(grid_blocks=blocks, resident_blocks=resident).efficiency

    def expected(self, predicted_us: Mapping[LaunchConfig, float]) -> LaunchConfig | None:
        return None

    def obstacle(self, config: LaunchConfig, found: Occupancy) -> str | None:
        """Return why a config cannot run, or that it spills more than the settings allow; the default may, since all
        others are compared with it."""
        spill = None if config == self.contenders.default else self.spill(found.resources)
        return spill or super().obstacle(config, found)

    def spill(self, resources: KernelResources) -> str | None:
        """Return that code spills more than the settings allow, if it does."""
        bound = self.call.settings.max_spill_bytes
        if resources.spill_bytes <= bound:
            return None
        return f"a thread spills {resources.spill_bytes} bytes, of which {bound} are allowed (max_spill_bytes)"

    def comparable(self, trials: Sequence[KernelTrial]) -> tuple[KernelTrial, ...]:
        """Return trials with scores. First calls race without an anchor: their times are put over that of the default,
        or of the fastest where that failed."""
        times = {trial.config: trial.time_us for trial in trials if trial.time_us is not None}
        anchor_us = times.get(self.contenders.default) or min(times.values(), default=1.0)
        return tuple(
            trial
            if trial.time_us is None or trial.relative_to_anchor is not None
            else dataclasses.replace(trial, relative_to_anchor=trial.time_us / anchor_us)
            for trial in trials
        )

    def launches_alike(self, config: LaunchConfig, other: LaunchConfig) -> bool:
        """Return whether the constants are equal, which may decide the grid of equal code; launch options do not."""
        return _constants(config) == _constants(other)

    def is_at_the_limit(self, config: LaunchConfig, time_us: float | None) -> bool:
        """Return whether no config can be much faster than a measured one, by what its launch moves and computes."""
        costs = None if time_us is None else costs_of(self.call, config)
        return costs is not None and costs.least_us(self.device) * AT_THE_LIMIT >= (time_us or 0.0)

    def _least_us(self, config: LaunchConfig) -> float | None:
        """Return the least time that the device needs for a launch; None where its author or its rates do not tell."""
        costs = author_costs(self.call, config)
        least_us = 0.0 if costs is None else costs.least_us(self.device)
        return max(least_us, LEAST_LAUNCH_US) if least_us else None


def _constants(config: LaunchConfig) -> dict[str, object]:
    return {name: value for name, value in config.values if name not in LAUNCH_OPTIONS}
