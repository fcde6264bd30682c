"""Files of the user's cache that processes lock; the operating system releases a lock when its process ends.

A file holds the id of the process that has locked it last, for those that wait.
"""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import platformdirs

QUIET_SECONDS = 5.0
"""How long a lock is waited for before that is told."""

_PAUSE_SECONDS = 0.05


class Deadline:
    """The end of a wait that several locks share.

    Args:
        wait_seconds: how long all of them together are waited for.
    """

    def __init__(self, wait_seconds: float = math.inf) -> None:
        self._end = time.monotonic() + wait_seconds

    @property
    def left_seconds(self) -> float:
        """What is left of the wait."""
        return max(0.0, self._end - time.monotonic())


def lock_folder() -> Path:
    """Return where the files of locks are."""
    return Path(platformdirs.user_cache_dir("blocktune", appauthor=False)) / "locks"


def open_lock_file(name: str) -> BinaryIO:
    """Return the open file of a lock, which is made if it is missing. A FIFO in its place is opened without waiting.

    Raises:
        OSError: it cannot be made or opened.
    """
    folder = lock_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(folder / f"{name}.lock", flags, 0o600), "wb", buffering=0)


def acquire_lock(file: BinaryIO, deadline: Deadline, on_wait: Callable[[str], None]) -> bool:
    """Lock a file, and return whether that succeeded before a deadline.

    Args:
        file: of `open_lock_file`.
        deadline: when to stop waiting.
        on_wait: called with the holder, in words, once the wait takes long.

    Raises:
        OSError: the file system has no locks.
    """
    quiet = Deadline(QUIET_SECONDS)
    while not _is_locked(file):
        if not deadline.left_seconds:
            return False
        if not quiet.left_seconds:
            on_wait(_holder(file))
            quiet = Deadline()
        time.sleep(_PAUSE_SECONDS)
    with contextlib.suppress(OSError):  # a full disk, or no regular file
        file.truncate(0)
        os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
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
