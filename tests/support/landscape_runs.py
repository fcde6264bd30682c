"""Whole runs on the synthetic tuning problem of `landscape`."""

from typing import Any

from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Finals, Measurement
from blocktune.tuner.search.report import Budget, TuningReport
from blocktune.tuner.search.tune import tune
from tests.support import landscape

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


def run(store: ResultStore, runner: ReplayRunner | None, **changes: Any) -> TuningReport:
    given: dict[str, Any] = {"device": landscape.DEVICE, "budget": SMALL, "compiler": landscape.InstantCompiler()}
    return tune(landscape.SHAPE, store=store, runner=runner, **given | changes)
