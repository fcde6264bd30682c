"""Measurements of a search are kept whatever happens to its database: in a spool first, then in the store.

A store that is locked, full, away or restarted costs no measurement: what waits is stored when it answers again, at the
latest by the next search or `tune doctor`.
"""

import logging
import time
from types import TracebackType
from typing import Self

from blocktune.db.records.records import AnyBest, AnyTrial
from blocktune.db.records.row_writer import sound_trial
from blocktune.db.spool import Left, Spool, left_files, left_records
from blocktune.db.store import ResultStore
from blocktune.db.tables.backups import DAY_SECONDS
from blocktune.kernels.values.errors import StoreError, UsageError

logger = logging.getLogger("blocktune")

IMPATIENT_SECONDS = 1.0
"""How long a measurement waits for the store's lock; the next one need not."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""Between two tries to reach a store that did not answer."""


class Recorder:
    """Keeps trials and winners of one search; use it as a context manager.

    Raises:
        StoreError: at the end, if anything could be kept neither in a spool nor in the store.
    """

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._hasty = store.with_timeout(IMPATIENT_SECONDS)
        self._spool = Spool(store.target)
        self._trials: list[AnyTrial] = []
        self._bests: list[AnyBest] = []
        self._in_memory_alone = False
        self._pause, self._not_before = FIRST_PAUSE_SECONDS, 0.0

    def __enter__(self) -> Self:
        self._store.back_up(unless_within_seconds=DAY_SECONDS)
        fold_left(self._store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._fold(self._store):
            self._report_waiting(is_failing=kind is not None)
        self._hasty.close()
        self._spool.close()

    def _report_waiting(self, *, is_failing: bool) -> None:
        count = len(self._trials) + len(self._bests)
        if not self._in_memory_alone:
            logger.warning("%d measurements wait in %s; `tune doctor` stores them.", count, self._spool.path)
            return
        lost = f"{count} measurements are lost: neither {self._store.label} nor a file next to it took them. Make room."
        if not is_failing:
            raise StoreError(lost)
        logger.warning("%s", lost)

    def record(self, trial: AnyTrial) -> None:
        """Keep a trial. When this returns, it outlives the process, or the warning of a full disk was logged.

        Raises:
            UsageError: it breaks a rule.
            StoreError: more waits for the store than a spool holds.
        """
        trial = sound_trial(trial)
        self._keep(trial)
        self._trials.append(trial)
        if time.monotonic() >= self._not_before:
            self._fold(self._hasty)

    def set_best(self, best: AnyBest) -> bool:
        """Keep a winner. Returns False if the store has a better one; True where that cannot be said yet.

        Raises:
            UsageError: it breaks a rule.
        """
        if self._fold(self._store):
            try:
                return self._store.set_best(best)
            except StoreError as error:
                self._has_failed(error)
        self._keep(best)
        self._bests.append(best)
        return True

    def _keep(self, record: AnyTrial | AnyBest) -> None:
        try:
            self._spool.keep(record)
        except (OSError, UsageError) as error:
            if not self._in_memory_alone:
                logger.warning(
                    "Measurements are kept in memory alone until %s takes them: %s", self._store.label, error
                )
            self._in_memory_alone = True

    def _fold(self, store: ResultStore) -> bool:
        """Store what waits. Returns whether nothing waits any more."""
        if not (self._trials or self._bests):
            return True
        try:
            store.put_all(self._trials, self._bests)
        except StoreError as error:
            self._has_failed(error)
            return False
        self._spool.clear()
        self._trials.clear()
        self._bests.clear()
        self._in_memory_alone = False
        self._pause, self._not_before = FIRST_PAUSE_SECONDS, 0.0
        return True

    def _has_failed(self, error: StoreError) -> None:
        if self._not_before == 0.0:  # said once for each time that the store is away
            logger.warning("Measurements wait in %s until the store answers. %s", self._spool.path or "memory", error)
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)


def fold_left(store: ResultStore) -> Left:
    """Store what killed searches left in spools. Returns what that was; a file that cannot be read stays, and is
    named in the log.

    Raises:
        StoreError: the store does not answer.
    """
    total = Left((), (), 0)
    for path in left_files(store.target):
        try:
            with left_records(path) as left:
                if left is not None:
                    store.put_all(left.trials, left.bests)
                    total = _sum(total, left)
        except StoreError as error:
            logger.warning("%s", error)
    return total


def _sum(one: Left, other: Left) -> Left:
    return Left(one.trials + other.trials, one.bests + other.bests, one.unreadable + other.unreadable)
