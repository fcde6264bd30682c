"""A store as its newest backup has it, with all that came later and can still be read."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from blocktune.db.exchange.merging import Results
from blocktune.db.recovery.replacing import exchange, fresh_path, remove_fresh, undo_killed_recoveries
from blocktune.db.recovery.salvage import salvage_rows
from blocktune.db.store import ResultStore
from blocktune.db.tables.backups import backups_of
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.files.ownership import require_trusted
from blocktune.kernels.files.reading import open_file
from blocktune.kernels.files.variables import TRUST_OWNER
from blocktune.kernels.values.errors import StoreError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """backup: what was taken. kept: where the file is that was in its place; empty if there was none. rows: trials and
    winners in the backup. newer: of the replaced file, that the backup does not have."""

    place: str
    backup: str
    kept: str
    rows: int
    newer: int


def restore(target: str | Path | None) -> Restored:
    """Put the newest sound backup in place of a store, with the rows that can be read of that.

    Raises:
        UsageError: the store is no file.
        StoreError: a directory is in its place, there is no sound backup, or the folder cannot be searched or written.
    """
    place = StoreTarget.of(target)
    if place.path is None:
        raise UsageError(
            f"{place.label} is on a server, and only a SQLite file has backups. Ask the administrator of the server."
        )
    is_there = not place.is_missing
    if place.path.is_dir():
        raise StoreError(f"The store {place.path} is a directory, not a file. Correct --db or BLOCKTUNE_DB.")
    undo_killed_recoveries(place.path)
    fresh = fresh_path(place.path)
    remove_fresh(fresh)
    try:
        backup, rows = _copy_backup(place.path, fresh)
        newer = _add_readable(place.path, fresh) if is_there else 0
        kept = str(exchange(place.path, fresh)) if is_there else ""
        if not kept:
            fresh.replace(place.path)
    except OSError as error:
        raise StoreError(
            f"{place.path.parent} cannot be written to: {error.strerror}. Give yourself write permission, and try "
            "again."
        ) from error
    finally:
        remove_fresh(fresh)
    return Restored(place=place.label, backup=str(backup), kept=kept, rows=rows, newer=newer)


def _copy_backup(path: Path, fresh: Path) -> tuple[Path, int]:
    """Copy the newest backup that is sound and our own; returns it, and how many trials and winners it has."""
    for backup in filter(_is_our_own, backups_of(path)):
        with open_file(backup) as source, fresh.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        try:
            return backup, _rows(fresh)
        except StoreError:
            remove_fresh(fresh)
    raise StoreError(
        f"{path} has no sound backup that you or root alone can write. `tune doctor --recover` saves what can be read; "
        f"{TRUST_OWNER.name}=1 takes a backup of another user."
    )


def _is_our_own(backup: Path) -> bool:
    """Return whether a backup is a file that no other user can change: what is restored is ours from then on."""
    try:
        require_trusted(backup)
        open_file(backup).close()
    except (OSError, StoreError):
        return False
    return True


def _rows(path: Path) -> int:
    """Return how many trials and winners a store holds.

    Raises:
        StoreError: the store is not sound.
    """
    with ResultStore.open(path) as store:
        health = store.health()
    if not health.sound:
        raise StoreError(f"The backup {path} is damaged: {health.integrity}. Use another one.")
    return sum(health.rows[name] for name in ("trial", "best"))


def _add_readable(path: Path, fresh: Path) -> int:
    """Bring what the replaced file has into the fresh one; returns how many rows that added."""
    found = salvage_rows(path)
    before = _rows(fresh)
    with ResultStore.open(fresh) as store:
        store.merge([Results(bests=found.bests, trials=found.trials)], trust=True)
    return _rows(fresh) - before
