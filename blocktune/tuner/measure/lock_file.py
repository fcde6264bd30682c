"""Files of the user's cache that processes lock; the operating system releases a lock when its process ends."""

import os
from pathlib import Path
from typing import BinaryIO

from blocktune.kernels.files.file_path import cache_folder


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
