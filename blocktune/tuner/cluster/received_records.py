"""Records that workers have sent and the driver has not stored yet: those that come at once are stored in one
transaction."""

import logging
from types import TracebackType
from typing import Self

from blocktune.db.recorder import fold_left
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables.backups import DAY_SECONDS
from blocktune.kernels.values.errors import StoreError
from blocktune.tuner.fleet.streamed_store import Packed, unpack_records

logger = logging.getLogger("blocktune")


class ReceivedRecords:
    """Keeps records of many workers in one store; a context manager.

    Raises:
        StoreError: at the end, if the store does not take what waits.
    """

    def __init__(self, store: ResultStore) -> None:
        self._store = store
        self._trials: list[Trial] = []
        self._bests: list[Best] = []
        self._is_late = False

    def __enter__(self) -> Self:
        self._store.back_up(unless_within_seconds=DAY_SECONDS)
        fold_left(self._store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.put_all(self._trials, self._bests)

    def add(self, message: Packed) -> None:
        """Take in what a worker sent."""
        trials, bests = unpack_records(message)
        self._trials += trials
        self._bests += bests

    def flush(self) -> None:
        """Store what waits. A store that does not take it now, which is logged once, gets it next time."""
        if not (self._trials or self._bests):
            return
        try:
            self._store.put_all(self._trials, self._bests)
        except StoreError as error:
            if not self._is_late:
                logger.warning("Measurements wait in memory until %s answers. %s", self._store.label, error)
            self._is_late = True
            return
        self._trials.clear()
        self._bests.clear()
        self._is_late = False
