"""Results of tuning a call: records and messages. A store that is away costs a warning."""

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blocktune.db.records.records import KernelBest, KernelTrial, Outcome
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import UsageError, needing
from blocktune.runtime.autotuned.boundary import tolerance, warn_of_failure
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.runtime.autotuned.fallback import KernelExplanation
from blocktune.runtime.autotuned.frozen import add_winner
from blocktune.runtime.selection.ladder import Candidate, Rung
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.drop_in.known import choice_of
from blocktune.tuner.measure.lock_file import Patience
from blocktune.tuner.subject.costs import rates_of
from blocktune.tuner.subject.launch import LaunchSubject

if TYPE_CHECKING:
    from blocktune.db.store import ResultStore

logger = logging.getLogger("blocktune")

LEAST_SECONDS, LOCK_TIMEOUT_SECONDS = 1.0, 30.0
"""How long a store is waited for at least, since writers take turns, and at most."""

OpenStore = Callable[[float], "ResultStore"]
"""Opens a store, and waits that many seconds for its lock."""


def open_store(lock_timeout_seconds: float) -> "ResultStore":
    """Return the user's store. With it comes SQLAlchemy, which takes a second to import.

    Raises:
        MissingPackageError: SQLAlchemy is not installed.
        StoreError: the store cannot be opened.
    """
    with needing("tune", "A store of winners"):
        from blocktune.db.store import ResultStore
    return ResultStore.open(lock_timeout_seconds=lock_timeout_seconds)


@dataclass(frozen=True, slots=True)
class CallResults:
    """The records that a store keeps of a call, measured by this software on this device, as far as it answers in
    time."""

    subject: LaunchSubject
    open_store: OpenStore
    patience: Patience

    @property
    def lock_timeout_seconds(self) -> float:
        """How long the store is waited for."""
        return min(max(self.patience.left_seconds, LEAST_SECONDS), LOCK_TIMEOUT_SECONDS)

    @contextmanager
    def opened(self) -> Iterator["ResultStore"]:
        """Yield the store; a long wait for it is logged."""
        from blocktune.db.tables.waiting import slow_answer_warning

        seconds = self.lock_timeout_seconds
        label = f"The store of results, with those of {self.subject.call.name},"
        with self.patience.spent(), slow_answer_warning(label, seconds), self.open_store(seconds) as store:
            yield store

    def known(self) -> dict[LaunchConfig, KernelTrial]:
        """Return how configs of this call ended before; those whose compile took too long may be tried again."""
        trials: dict[LaunchConfig, KernelTrial] = {}
        with tolerance(self.subject.call.name, "a store of its results"), self.opened() as store:
            trials = self.trials_in(store)
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
            with self.opened() as store:
                store.put_all(lasting, [] if failed_by_machine else [best])
        except Exception as error:  # whatever is wrong with a place, a disk or a server
            warn_of_failure(self.subject.call.name, "a store of its results", error)
            keep_here(best)


def keep_here(best: KernelBest) -> None:
    """Let this process keep a winner, also for other ranks, unless its time is none, as of a bench of its own."""
    if best.time_us is None or not 0 < best.time_us < math.inf:
        return
    winner = TunedConfig(shape=best.shape.problem, config=best.config, origin=Origin.MEASURED, time_us=best.time_us)
    add_winner((best.device.key, best.config.kernel, best.kernel_hash), winner)


def measured_choice(
    subject: LaunchSubject,
    best: KernelBest,
    trial: KernelTrial | None,
    dropped: Mapping[str, str],
    seconds: float,
    times_us: Mapping[LaunchConfig, float] | None = None,
) -> KernelExplanation:
    """Return the choice of a winner that this process has measured.

    Args:
        subject: the call.
        best: its winner.
        trial: how the winner was measured, if the store has answered.
        dropped: why configs have no time, by their label.
        seconds: what the measuring took.
        times_us: of the configs that were timed.
    """
    call, time_us, rates = subject.call, best.time_us or 0.0, ""
    try:
        rates = rates_of(call, best.config, time_us, subject.device)
    except UsageError:  # `costs` that return something else
        raise
    except Exception as error:  # such as a `launch_metadata` that expects a launch
        warn_of_failure(call.name, "its rates", error)
    winner = Candidate(
        rung=Rung.EXACT, config=best.config, origin=Origin.MEASURED, tuned_for=call.problem, time_us=time_us
    )
    return replace(
        choice_of(call, winner, subject.device),
        rates=rates,
        default_time_us=best.default_time_us,
        tuned=True,
        seconds=seconds,
        dropped=dict(dropped),
        times_us=times_us,
        spread=None if trial is None else _spread(trial.samples_us),
        spill_bytes=None if trial is None or trial.resources is None else trial.resources.spill_bytes,
    )


def _spread(samples_us: Sequence[float]) -> float | None:
    """Return half of what the middle half of times spans, over their median; None of fewer than four."""
    if len(samples_us) < 4:
        return None
    low, median_us, high = statistics.quantiles(samples_us, n=4)
    return (high - low) / (2 * median_us)
