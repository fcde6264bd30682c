"""Results of tuning a call: records and messages. A store that is away costs a warning."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blocktune.db.records.records import KernelBest, KernelTrial, Outcome
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import BlocktuneError, needing
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.frozen import add_winner
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.drop_in.known import choice_of
from blocktune.tuner.subject.costs import rates_of
from blocktune.tuner.subject.launch import LaunchSubject

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore

logger = logging.getLogger("blocktune")

OpenStore = Callable[[], "ResultStore"]


def open_store() -> "ResultStore":
    """Return the user's store. With it comes SQLAlchemy, which takes a second to import.

    Raises:
        MissingPackageError: SQLAlchemy is not installed.
        StoreError: the store cannot be opened.
    """
    with needing("tune", "A store of winners"):
        from blocktune.db.store import ResultStore
    return ResultStore.open()


@dataclass(frozen=True, slots=True)
class CallResults:
    """The records that a store keeps of a call, measured by this software on this device."""

    subject: LaunchSubject
    open_store: OpenStore

    def known(self) -> dict[LaunchConfig, KernelTrial]:
        """Return how configs of this call ended before; those whose compile took too long may be tried again."""
        try:
            with self.open_store() as store:
                trials = self.trials_in(store)
        except BlocktuneError as error:
            logger.info("Earlier results of %s are not known: %s", self.subject.call.name, error)
            return {}
        return {config: trial for config, trial in trials.items() if trial.outcome is not Outcome.COMPILE_TIMEOUT}

    def trials_in(self, store: "ResultStore") -> dict[LaunchConfig, KernelTrial]:
        """Return the trials of this call in a store."""
        subject = self.subject
        found = store.trials(
            subject.device, subject.problem, environment=subject.environment, kernel_hash=subject.kernel_hash
        )
        return {trial.config: trial for trial in found}

    def save(
        self, trials: Mapping[LaunchConfig, KernelTrial], best: KernelBest, failed_by_machine: set[LaunchConfig]
    ) -> None:
        """Keep new trials and the winner. Without a store this process keeps the winner, also for other ranks.

        What failed by the machine is not kept, and then neither is the winner: the next process tries those configs,
        and races them against the best known ones.
        """
        lasting = [trial for config, trial in trials.items() if config not in failed_by_machine]
        for config in failed_by_machine:
            logger.warning(
                "%s: %s failed by the machine, and is tried again by the next process: %s",
                self.subject.call.name,
                config.label,
                trials[config].error,
            )
        try:
            with self.open_store() as store:
                store.put_all(lasting, [] if failed_by_machine else [best])
        except BlocktuneError as error:
            self.warn(error)
            keep_here(best)

    def warn(self, error: BlocktuneError) -> None:
        """Say that the store fails: a call goes on with what it has measured."""
        logger.warning("The results of %s are not kept: %s", self.subject.call.name, error)


def keep_here(best: KernelBest) -> None:
    """Let this process keep a winner, also for other ranks."""
    winner = TunedConfig(shape=best.shape.problem, config=best.config, origin=Origin.MEASURED, time_us=best.time_us)
    add_winner((best.device.key, best.config.kernel, best.kernel_hash), winner)


def measured_choice(
    subject: LaunchSubject,
    best: KernelBest,
    dropped: Mapping[str, str],
    seconds: float,
    times_us: Mapping[LaunchConfig, float] | None = None,
) -> KernelExplanation:
    """Return the choice of a winner that this process has measured.

    Args:
        subject: the call.
        best: its winner.
        dropped: why configs have no time, by their label.
        seconds: what the measuring took.
        times_us: of the configs that were timed.
    """
    call, time_us = subject.call, best.time_us or 0.0
    winner = Candidate(
        rung=Rung.EXACT, config=best.config, origin=Origin.MEASURED, tuned_for=call.problem, time_us=time_us
    )
    return replace(
        choice_of(call, winner, subject.device),
        rates=rates_of(call, best.config, time_us, subject.device),
        default_time_us=best.default_time_us,
        tuned=True,
        seconds=seconds,
        dropped=dict(dropped),
        times_us=times_us,
    )
