"""Whole runs on the synthetic tuning problem of `landscape`."""

import statistics
from collections.abc import Sequence
from typing import Any

from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.energy import Burst
from blocktune.tuner.measure.measurement import Energies, Finals, Measurement
from blocktune.tuner.search.report import Budget, TuningReport
from blocktune.tuner.search.tune import tune
from tests.support.models import landscape

DEFAULT = landscape.KERNELS["pointers"].default_config(landscape.SHAPE, landscape.DEVICE.limits)
SMALL = Budget(trials=60)


class Replay(ReplayRunner):
    """A replay of one landscape; finals and confirmations are counted."""

    def __init__(self, salt: int = 0, *, interrupt_after: int | None = None):
        super().__init__(landscape.measurements(salt))
        self.finals_held = 0
        self._interrupt_after = interrupt_after

    def measure(self, config: KernelConfig) -> Measurement:
        if len(self.measured) == self._interrupt_after:
            raise KeyboardInterrupt
        return super().measure(config)

    def finals(self, configs: Any) -> Finals:
        self.finals_held += 1
        return super().finals(configs)


class Metered(Replay):
    """A replay on a GPU that draws 700 W for configs with `greedy` warps and 400 W for others, and 1 % more or less by
    turns. `bursts` lists who burst and how many rounds.
    """

    def __init__(self, salt: int = 0, *, greedy: int = 2) -> None:
        super().__init__(salt)
        self._greedy = greedy
        self.bursts: list[tuple[list[KernelConfig], int]] = []

    def energies(self, configs: Sequence[KernelConfig], rounds: int) -> Energies:
        self.bursts.append((list(configs), rounds))
        return Energies(
            bursts={config: tuple(self._burst(config, number) for number in range(rounds)) for config in configs}
        )

    def _burst(self, config: KernelConfig, number: int) -> Burst:
        time_us = statistics.median(self._recorded[config].samples_us)
        power_w = (700.0 if config.num_warps == self._greedy else 400.0) * (1.01 if number % 2 else 0.99)
        return Burst(energy_mj=power_w * time_us / 1e3, time_us=time_us)


def run(store: ResultStore, runner: ReplayRunner | None, **changes: Any) -> TuningReport:
    given: dict[str, Any] = {"device": landscape.DEVICE, "budget": SMALL, "compiler": landscape.InstantCompiler()}
    return tune(landscape.SHAPE, store=store, runner=runner, **given | changes)
