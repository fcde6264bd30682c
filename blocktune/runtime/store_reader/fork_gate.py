"""Keeps SQLite connections closed while another thread forks.

SQLite keeps its locks in the memory of the process. A child that is forked while another thread has a connection open
inherits them held for ever: whatever it opens on the same file then waits for ever. So a fork waits for the moment in
which no other thread has a connection open, which here are open for milliseconds; a long reading breaks off.
"""

import os
import sqlite3
import threading
from typing import Any

MAX_SECONDS = 1.0
"""How long a fork waits at most: a thread may be waiting for the lock of another process."""


class ForkGate:
    """Counts the open connections of every thread."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, int] = {}  # by thread
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether a fork waits, or happens: who has a connection open should close it soon."""
        return self._closed

    def enter(self) -> int:
        """Count a connection that is about to be opened, and return what to leave with. Wait for a fork that waits,
        unless the fork waits for this very thread."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._closed or thread in self._open)
            self._open[thread] = self._open.get(thread, 0) + 1
        return thread

    def leave(self, thread: int) -> None:
        """Count a connection as closed, by whichever thread."""
        with self._changed:
            left = self._open.get(thread, 0) - 1
            if left > 0:
                self._open[thread] = left
            else:
                self._open.pop(thread, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until no other thread has a connection open, and keep new ones from being opened."""
        self._changed.acquire()
        self._closed = True
        own = threading.get_ident()
        self._changed.wait_for(lambda: not self._open.keys() - {own}, MAX_SECONDS)

    def reopen(self) -> None:
        """Let connections be opened again: the fork has happened."""
        self._closed = False
        self._changed.notify_all()
        self._changed.release()


gate = ForkGate()
os.register_at_fork(before=gate.close, after_in_parent=gate.reopen, after_in_child=gate._reset)


class GatedConnection(sqlite3.Connection):
    """A connection that forks of other threads wait for; it has to be closed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._thread: int | None = gate.enter()
        try:
            super().__init__(*arguments, **options)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        super().close()
        self._leave()

    def _leave(self) -> None:
        if self._thread is not None:
            gate.leave(self._thread)
            self._thread = None
