"""What is kept of the tuning of a call: every trial, and the winner. A store that is away costs a warning."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blocktune.db.records.records import Best, Environment, KernelBest, KernelTrial, Outcome, Telemetry, Trial
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.autotuned.call import Call
from blocktune.runtime.autotuned.config import KernelProblem, UserConfig
from blocktune.runtime.autotuned.frozen import add_winner
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.launches.race import Standing

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore

logger = logging.getLogger("blocktune")

OpenStore = Callable[[], "ResultStore"]


def open_store() -> "ResultStore":
    """Return the user's store. With it comes SQLAlchemy, which takes a second to import."""
    from blocktune.db.store import ResultStore

    return ResultStore.open()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a config of a call ended.

    time_us: its median, if it ran. error: why there is no time, or a remark. telemetry: the GPU's state after its race.
    transient: it failed by the machine, such as by a full disk, and may do well later.
    """

    outcome: Outcome
    time_us: float | None = None
    samples_us: tuple[float, ...] = ()
    error: str = ""
    seconds: float = 0.0
    telemetry: Telemetry = field(default_factory=Telemetry)
    transient: bool = False


@dataclass(frozen=True, slots=True)
class Results:
    """What a store keeps of a call, measured by this software on this device."""

    call: Call
    device: DeviceSpec
    environment: Environment
    open_store: OpenStore

    def known(self) -> dict[UserConfig, Ending]:
        """Return how configs of this call ended before; those whose compile took too long may be tried again."""
        problem, trials = KernelProblem(self.call.name, self.call.problem), list[KernelTrial]()
        with self._warned(), self.open_store() as store:
            trials = store.trials(self.device, problem, environment=self.environment, kernel_hash=self.call.source_hash)
        return {
            trial.config: Ending(trial.outcome, trial.time_us, trial.samples_us, trial.error, trial.compile_seconds)
            for trial in trials
            if trial.outcome is not Outcome.COMPILE_TIMEOUT
        }

    def save(self, endings: Mapping[UserConfig, Ending], standing: Standing) -> None:
        """Keep new endings and the winner. Without a store this process keeps the winner, also for other ranks.

        What failed by the machine is not kept, and then neither is the winner: the next process tries those configs,
        and races them against the best known ones.
        """
        lasting = {config: ending for config, ending in endings.items() if not ending.transient}
        trials, best = [self._trial(config, ending) for config, ending in lasting.items()], self._best(standing)
        for config in endings.keys() - lasting.keys():
            logger.warning(
                "%s: %s failed by the machine, and is tried again by the next process: %s",
                self.call.name,
                config.label,
                endings[config].error,
            )
        with self._warned():
            with self.open_store() as store:
                store.put_all(trials, [best] if len(lasting) == len(endings) else [])
            return
        winner = TunedConfig(shape=best.shape.problem, config=best.config, origin=Origin.MEASURED, time_us=best.time_us)
        add_winner((self.device.key, self.call.name, self.call.source_hash), winner)

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        """Turn an error of the store into a warning: a call goes on with what it has measured."""
        try:
            yield
        except BlocktuneError as error:
            logger.warning("The results of %s are not kept: %s", self.call.name, error)

    def _trial(self, config: UserConfig, ending: Ending) -> KernelTrial:
        return Trial(
            device=self.device,
            environment=self.environment,
            shape=KernelProblem(self.call.name, self.call.problem),
            config=config,
            kernel_hash=self.call.source_hash,
            outcome=ending.outcome,
            time_us=ending.time_us,
            samples_us=ending.samples_us,
            error=ending.error,
            compile_seconds=ending.seconds,
            telemetry=ending.telemetry,
        )

    def _best(self, standing: Standing) -> KernelBest:
        default, winner = self.call.default, standing.winner
        default_us = standing.time_us(default) if default in standing.samples_us else None
        return Best(
            device=self.device,
            environment=self.environment,
            shape=KernelProblem(self.call.name, self.call.listed_problem),
            config=winner,
            kernel_hash=self.call.source_hash,
            origin=Origin.MEASURED,
            time_us=standing.time_us(winner),
            default=default,
            default_time_us=default_us,
            speedup_over_default=None if default_us is None else default_us / standing.time_us(winner),
            trials=len(self.call.configs),
        )
