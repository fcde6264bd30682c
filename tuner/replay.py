"""A runner that repeats what was recorded: to compare searches, and to test them, without a GPU."""

from collections.abc import Iterable, Mapping, Sequence

from blocktune.db.records import Outcome, Trial
from blocktune.kernels.config import KernelConfig
from blocktune.tuner.measurement import Finals, Measurement


class ReplayRunner:
    """Answers from recorded measurements; a config that was not recorded is a `run_error`.

    Its finals return the recorded samples, cut to the shortest; `measured` lists what was asked for, in order.
    """

    def __init__(self, recorded: Mapping[KernelConfig, Measurement]):
        self._recorded = dict(recorded)
        self.measured: list[KernelConfig] = []

    @classmethod
    def of_trials(cls, trials: Iterable[Trial]) -> "ReplayRunner":
        """A replay of stored trials; the last one of a config counts."""
        return cls(
            {
                trial.config: Measurement(
                    outcome=trial.outcome,
                    time_us=trial.time_us,
                    relative_to_anchor=trial.relative_to_anchor,
                    samples_us=trial.samples_us,
                    error=trial.error,
                    seconds=trial.bench_seconds,
                    telemetry=trial.telemetry,
                )
                for trial in trials
            }
        )

    def prepare(self) -> None:
        """Nothing takes long to start."""

    def measure(self, config: KernelConfig) -> Measurement:
        self.measured.append(config)
        unrecorded = Measurement(outcome=Outcome.RUN_ERROR, error=f"{config.label} was not recorded")
        return self._recorded.get(config, unrecorded)

    def finals(self, configs: Sequence[KernelConfig]) -> Finals:
        samples = {config: self._recorded[config].samples_us for config in configs}
        rounds = min(map(len, samples.values()), default=0)
        return Finals(samples_us={config: times[:rounds] for config, times in samples.items()})

    def confirm(self, config: KernelConfig) -> Measurement:
        return Measurement(outcome=self._recorded[config].outcome)

    def close(self) -> None:
        """Nothing was started."""
