"""One process of a machine tunes a call; the others wait for what it finds, for a bounded time."""

import contextlib
import fcntl
import hashlib
import time
from collections.abc import Iterator

from blocktune.tuner.measure.lock_file import open_lock_file

_PAUSE_SECONDS = 0.05


@contextlib.contextmanager
def node_lock(name: str, wait_seconds: float) -> Iterator[bool]:
    """Hold the lock of a name among this user's processes; gives False if another one still holds it after the wait.

    The lock is a file that the operating system releases when a process ends, however it ends. Where no such file can
    be made every process tunes for itself.
    """
    try:
        file = open_lock_file(f"tune-{hashlib.sha256(name.encode()).hexdigest()[:16]}")
    except OSError:
        yield True
        return
    with file:
        yield _acquired(file.fileno(), time.monotonic() + wait_seconds)


def _acquired(file: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        else:
            return True
