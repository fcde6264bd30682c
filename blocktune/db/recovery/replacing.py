"""A damaged store's file and the fresh one that takes its place, so that a recovery may be killed at any moment."""

import os
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from glob import escape
from pathlib import Path

from blocktune.kernels.values.errors import StoreError

JOURNALS = ("-wal", "-shm")
"""The suffixes of the files that SQLite keeps next to a database."""


def fresh_path(path: Path) -> Path:
    """Return where this process may make a fresh store, next to the damaged one."""
    return path.with_name(f".{path.name}.recovering-{os.getpid()}")


def remove_fresh(fresh: Path) -> None:
    """Remove a fresh store that has not taken its place, and the files that SQLite kept next to it."""
    for suffix in ("", *JOURNALS):
        Path(f"{fresh}{suffix}").unlink(missing_ok=True)


def undo_killed_recoveries(path: Path) -> None:
    """Make good what recoveries left that were killed: fresh stores without an owner, and a log that had been moved
    away from a damaged file that is still in its place."""
    for left in path.parent.glob(f".{escape(path.name)}.recovering-*"):
        owner = left.name.rpartition("-")[2]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            remove_fresh(left)
    for kept in path.parent.glob(f"{escape(path.name)}.corrupt-*[0-9]"):
        if kept.samefile(path):
            for suffix in JOURNALS:
                if Path(f"{kept}{suffix}").exists() and not Path(f"{path}{suffix}").exists():
                    os.rename(f"{kept}{suffix}", f"{path}{suffix}")
            kept.unlink()


def exchange(path: Path, fresh: Path) -> Path:
    """Put the fresh file in place of the damaged one, with its mode and, where allowed, its owner. The damaged one
    is kept with the commits that waited next to it, and there is a store at every moment. Returns where it is.

    Raises:
        StoreError: the directory cannot be written.
    """
    kept = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
    try:
        shutil.copymode(path, fresh)
        with suppress(PermissionError):  # only root gives files away
            os.chown(fresh, path.stat().st_uid, path.stat().st_gid)
        os.link(path, kept)
        for suffix in JOURNALS:  # before the fresh file comes, since SQLite would take them for that one's
            if Path(f"{path}{suffix}").exists():
                os.rename(f"{path}{suffix}", f"{kept}{suffix}")
        fresh.replace(path)
    except OSError as error:
        raise StoreError(
            f"Files in {path.parent} cannot be renamed: {error.strerror}. What was there is in {path.name} or "
            f"{kept.name}; give the directory write permission and try again."
        ) from error
    return kept
