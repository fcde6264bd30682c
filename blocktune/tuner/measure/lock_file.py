"""Files of the user's cache that processes lock; the operating system releases a lock when its process ends.

A file holds the id of the process that has locked it last, for those that wait.
"""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from blocktune.kernels.files.file_path import cache_folder

QUIET_SECONDS = 5.0
"""How long a process waits for a lock before it says so."""

_PAUSE_SECONDS = 0.05


class Patience:
    """The time that several locks together are waited for; what a process works in between does not count.

    left_seconds: what is left of it.

    Args:
        wait_seconds: all of it.
    """

    def __init__(self, wait_seconds: float = math.inf) -> None:
        self.left_seconds = wait_seconds

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Take the time of a wait from what is left."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.left_seconds = max(0.0, self.left_seconds - (time.monotonic() - started))


def lock_folder() -> Path:
    """Return where the files of locks are."""
    return cache_folder() / "locks"


def open_lock_file(name: str) -> BinaryIO:
    """Return the open file of a lock, which is made if it is missing. A FIFO in its place is opened without waiting.

    Raises:
        OSError: it cannot be made or opened.
    """
    folder = lock_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(folder / f"{name}.lock", flags, 0o600), "wb", buffering=0)


def acquire_lock(file: BinaryIO, patience: Patience, on_wait: Callable[[str], None]) -> bool:
    """Lock a file, and return whether that succeeded in time.

    Args:
        file: of `open_lock_file`.
        patience: how long to wait.
        on_wait: called with the holder, in words, once the wait takes long.

    Raises:
        OSError: the file system has no locks.
    """
    with patience.spent():
        if not _wait_for(file, patience.left_seconds, on_wait):
            return False
    with contextlib.suppress(OSError):  # a full disk, or no regular file
        file.truncate(0)
        os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
    return True


def _wait_for(file: BinaryIO, wait_seconds: float, on_wait: Callable[[str], None]) -> bool:
    started, is_told = time.monotonic(), False
    while not _is_locked(file):
        waited_seconds = time.monotonic() - started
        if waited_seconds >= wait_seconds:
            return False
        if waited_seconds >= QUIET_SECONDS and not is_told:
            is_told = True
            on_wait(_holder(file))
        time.sleep(_PAUSE_SECONDS)
    return True


def _is_locked(file: BinaryIO) -> bool:
    """Lock a file, and return whether that succeeded at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: BinaryIO) -> str:
    """Return the process that holds a lock, in words."""
    try:
        process = int(os.pread(file.fileno(), 20, 0))
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):  # of an older version, or of another machine
        return "another process"
    return f"process {process}{' (stopped)' if state in 'Tt' else ''}"
