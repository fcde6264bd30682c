"""Values that threads of their own read from files, so that no call waits for a disk, a lock or a busy interpreter.

A call that needs such a value waits a moment for it, once, and then goes on without. When the value comes after that,
whoever went on without is called back. A forked child has none of its parent's threads: it reads again for itself.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

logger = logging.getLogger("blocktune")

CALL_SECONDS = 0.03
"""How long a call waits for what it would like to know, from the beginning of the reading on."""

MAX_SECONDS = 30.0
"""How long those wait who need the answer that stays."""

LAST_SECONDS = 0.2
"""How long the end of the process waits for what is being read."""

Value = TypeVar("Value")


class BackgroundRead(Generic[Value]):
    """A value that is read on a thread of its own, from the first question on.

    Args:
        read: reads the value; must not raise.
        changed: called on that thread when the value has come after a caller went on without it.
    """

    def __init__(self, read: Callable[[], Value], changed: Callable[[], None]) -> None:
        self._read = read
        self._changed = changed
        self._missed = False
        self._forget()

    def _forget(self) -> None:
        """Reset everything but who went on without the value."""
        self._value: Value | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0

    @property
    def is_late(self) -> bool:
        """Return whether the value is there now, and a caller went on without it."""
        return self._missed and self._done.is_set()

    def begin(self) -> None:
        """Start to read, unless that has begun. Where the process may have no more threads, it is read here."""
        if self._began:
            return
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="blocktune-configs", daemon=True)
        _running[id(self)] = self
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.info("Configs are read at once: %s.", error)
            self._run()

    def value(self, seconds: float) -> Value | None:
        """Return the value; None if it is not there `seconds` after the reading began."""
        self.begin()
        if self._done.wait(max(0.0, self._began + seconds - time.monotonic())):
            return self._value
        self._missed = True
        return self._value  # it may have come at this very moment

    def _run(self) -> None:
        done = self._done  # of this process: a fork makes another one
        try:
            self._value = self._read()
        finally:
            _running.pop(id(self), None)
            done.set()
        if self._missed:
            self._changed()

    def _begin_again(self) -> None:
        """Forget the thread, which a forked child lacks; begin at once if a caller waits to be called back."""
        self._forget()
        if self._missed:
            self.begin()

    def _end(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)


_running: dict[int, BackgroundRead[Any]] = {}
"""What is being read, by id. It is copied and changed in single steps of the interpreter, so it needs no lock."""


def _after_fork_in_child() -> None:
    interrupted = list(_running.values())
    _running.clear()
    for read in interrupted:
        read._begin_again()


def _at_exit() -> None:
    deadline = time.monotonic() + LAST_SECONDS
    for read in list(_running.values()):
        read._end(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
