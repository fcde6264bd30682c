"""Backups of a SQLite store, next to it: whole files of its rows as they were, the newest three.

One is made before the schema is upgraded, before a merge, and once a day of use. Where none can be made, the work goes
on without. `tune doctor --restore` takes the newest that is sound.
"""

import fcntl
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from glob import escape
from pathlib import Path

from blocktune.db.tables.sqlite_file import connect_sqlite

logger = logging.getLogger("blocktune")

KEPT = 3
DAY_SECONDS = 24 * 3600.0
MERGE_SECONDS = 600.0
"""Merges that follow each other more quickly are one change."""

_LOCK_SECONDS = 5.0


def backups_of(path: Path) -> list[Path]:
    """Return the backups of a store, newest first. One of the future, from before a clock was put back, is the oldest:
    it would be kept for good, in place of each that is made."""
    now = _name_of(path)
    found = path.parent.glob(f"{escape(path.name)}.backup-*[0-9]")
    return sorted(found, key=lambda backup: (backup.name <= now, backup.name), reverse=True)


def _name_of(path: Path) -> str:
    """Return the name of a backup that is made at this moment."""
    return f"{path.name}.backup-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"


def back_up(path: Path, *, unless_within_seconds: float = 0.0) -> Path | None:
    """Make a backup of a store, and remove the oldest of more than three.

    Args:
        path: of the store.
        unless_within_seconds: none is made if there is one that is not older.

    Returns:
        the backup; None where none was made: the store is empty, damaged or locked, or there is no room.
    """
    unfinished = path.with_name(f".{path.name}.backing-up")
    try:
        if _is_younger(backups_of(path)[:1], unless_within_seconds) or not _holds_results(path):
            return None
        with _claim_backup(path) as is_ours:
            made = _make_backup(path, unfinished) if is_ours else None
    except sqlite3.Error as error:
        logger.info("No backup of %s is made: %s.", path, error)
        return None
    except OSError as error:
        logger.warning("No backup of %s is made: %s.", path, error)
        return None
    for old in backups_of(path)[KEPT:]:
        old.unlink(missing_ok=True)
    return made


@contextmanager
def _claim_backup(path: Path) -> Iterator[bool]:
    """Yield whether this process makes the backup of a store until the block ends. The lock of a process that is killed
    is released at once. It is that of a file of its own: over NFS it would keep SQLite out of the file of the backup.
    """
    lock = path.with_name(f".{path.name}.backing-up.lock")
    descriptor = _open_lock(lock)
    is_ours = False
    try:
        is_ours = _is_locked(descriptor) and _is_at(lock, descriptor)
        yield is_ours
    finally:
        if is_ours:
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def _open_lock(lock: Path) -> int:
    """Return a descriptor of the lock's file. One that another user's process has left, and that is not readable, makes
    room where the folder allows it."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(lock, flags, 0o600)
    except PermissionError:
        lock.unlink()
        return os.open(lock, flags, 0o600)


def _is_locked(descriptor: int) -> bool:
    """Lock a file, unless another process has it; returns whether it is locked now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path still means an open file: the backup of another process may have been finished since."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def _make_backup(path: Path, unfinished: Path) -> Path | None:
    """Return the backup, once it is whole."""
    made = path.with_name(_name_of(path))
    try:
        for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
            left.unlink(missing_ok=True)  # of a process that was killed
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        _copy(path, unfinished)
        unfinished.replace(made)
    except (OSError, sqlite3.Error) as error:
        logger.warning("No backup of %s is made: %s.", path, error)
        unfinished.unlink(missing_ok=True)
        return None
    return made


def _copy(path: Path, unfinished: Path) -> None:
    """Write the rows of a sound store into a fresh file; writers go on meanwhile."""
    with closing(connect_sqlite(f"{path.as_uri()}?mode=ro", _LOCK_SECONDS)) as connection:
        (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(f"it is damaged ({state!s:.200})")
        connection.execute("VACUUM INTO ?", (f"{unfinished}",))
    shutil.copymode(path, unfinished)


def _holds_results(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with closing(connect_sqlite(f"{path.as_uri()}?mode=ro", _LOCK_SECONDS)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        known = tables & {"environment"}  # every result of every schema refers to one
        return any(connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() for name in known)


def _is_younger(paths: list[Path], seconds: float) -> bool:
    return any(0 <= time.time() - path.stat().st_mtime < seconds for path in paths)
