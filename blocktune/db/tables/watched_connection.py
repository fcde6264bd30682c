"""A connection that notices when its server does not answer: nothing else would end the wait for one that accepts what
is sent and is silent, such as a proxy whose server has gone.

Its driver is optional, so that only who connects by it imports this.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any, Self

import psycopg

from blocktune.db.tables.waiting import BUSY, CONNECT_SECONDS

SPARE_SECONDS = 1.0
"""Beyond the patience for a lock, so that the server is the first to give up."""

_IS_AT_WORK = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND state = 'active'"


class WatchedConnection(psycopg.Connection[Any]):
    """A connection to PostgreSQL. backend_pid: of the server's process that does the present transaction."""

    patience_seconds: float
    backend_pid: int | None = None
    _again: Callable[..., Self]

    @classmethod
    def connect_patiently(cls, patience_seconds: float, *arguments: Any, **options: Any) -> Self:
        """Return a connection, as the driver would. An answer is waited for as long as a lock."""
        connection = cls.connect(*arguments, **options)
        connection.patience_seconds = patience_seconds
        connection._again = partial(
            cls.connect_patiently, min(patience_seconds, CONNECT_SECONDS), *arguments, **options
        )
        return connection

    def wait(self, gen: Generator[Any, Any, Any], *words: Any, **options: Any) -> Any:
        """Return what a piece of the driver's work returns; the driver calls this.

        Raises:
            psycopg.OperationalError: the server has fallen silent. The connection is closed.
        """
        return super().wait(self._watch_waiting(gen), *words, **options)

    def _watch_waiting(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Pass on what the driver waits for. It comes back several times a second, without anything if none came."""
        patience_seconds = self.patience_seconds + SPARE_SECONDS
        deadline = time.monotonic() + patience_seconds
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                is_late = time.monotonic() > deadline
                if is_late and not ready and not self._is_at_work():
                    self.close()
                    raise psycopg.OperationalError(f"the server has not answered for {patience_seconds:.0f} s")
                if is_late or ready:
                    deadline = time.monotonic() + patience_seconds
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value

    def _is_at_work(self) -> bool:
        """Return whether the server works for this connection, by asking on another one."""
        if self.backend_pid is None:
            return False
        try:
            with closing(self._again()) as other:
                return other.execute(_IS_AT_WORK, (self.backend_pid,)).fetchone() is not None
        except psycopg.OperationalError as error:
            return BUSY.search(str(error)) is not None
