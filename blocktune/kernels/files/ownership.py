"""Trusted files in production: those that only their owner can change, this user or root.

What another user can write, that user can slow down: configs are bounded, so that is the harm. It is refused all the
same, unless BLOCKTUNE_TRUST_OWNER=1 says that the owner is meant.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from blocktune.kernels.files.variables import TRUST_OWNER
from blocktune.kernels.values.errors import StoreError

COMPANIONS = ("-wal", "-journal", "-shm")
"""What SQLite keeps next to a file and believes. Whoever reads or writes a store of a group makes them."""


def require_trusted(path: Path) -> None:
    """Check that no other user can change what is read.

    Raises:
        StoreError: another user owns it, or others may write it, or put another file in its place.
        OSError: a directory on the way may not be searched.
    """
    reasons = () if TRUST_OWNER.is_on() else tuple(doubts(path))
    if reasons:
        raise StoreError(
            f"What production reads must be writable by you or root alone, but {'; '.join(reasons)}. Change the owner "
            f"or mode (chown, chmod o-w), or set {TRUST_OWNER.name}=1 to trust it."
        )


def doubts(path: Path) -> Iterator[str]:
    """Yield every reason why another user may have written what is at a path; nothing for what is not there."""
    real = Path(os.path.realpath(path))
    if path.is_symlink():
        yield from _of_entry(path)
        yield from _of_folder(path.absolute().parent)
    yield from _of_entry(real)
    if _is_for_all(real.parent):
        for suffix in COMPANIONS:
            yield from _of_entry(Path(f"{real}{suffix}"))
    yield from _of_folder(real.parent)


def _of_entry(path: Path) -> Iterator[str]:
    try:
        state = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if state.st_uid not in (0, os.geteuid()):
        yield f"{path} belongs to user {state.st_uid}"
    if state.st_mode & stat.S_IWOTH and not stat.S_ISLNK(state.st_mode):
        yield f"every user may write {path}"


def _of_folder(path: Path) -> Iterator[str]:
    """Yield a doubt where others may rename files, unless the sticky bit keeps them from those of others."""
    if _is_for_all(path) and not path.stat().st_mode & stat.S_ISVTX:
        yield f"every user may replace files in {path}"


def _is_for_all(folder: Path) -> bool:
    """Return whether every user may make files in a folder."""
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except (FileNotFoundError, NotADirectoryError):
        return False
