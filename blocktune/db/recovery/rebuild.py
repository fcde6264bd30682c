"""A fresh store with all rows that can still be read from a damaged one. The damaged one is kept next to it."""

from codecs import getincrementaldecoder
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blocktune.db.exchange.merging import Results
from blocktune.db.recovery.replacing import exchange, fresh_path, remove_fresh, undo_killed_recoveries
from blocktune.db.recovery.salvage import Salvaged, salvage_rows
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.sqlite_file import LOCK_TIMEOUT_SECONDS
from blocktune.kernels.files.reading import open_file
from blocktune.kernels.values.errors import ForeignStoreError, StoreCorruptError, StoreError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Hold what was saved.

    kept: where the damaged file is now.
    lost_at_least: trials and winners that were seen and break a rule, or refer to what is lost.
    lost_at_most: lost_at_least plus those that may have stood where nothing can be read; None where pages are missing,
        so that the number is unknown.
    """

    place: str
    kept: str
    bests: int
    trials: int
    lost_at_least: int
    lost_at_most: int | None

    @property
    def losses(self) -> str:
        """How many are lost, in words."""
        if self.lost_at_most is None:
            return f"at least {self.lost_at_least} are lost; how many more is unknown, since pages are missing"
        if self.lost_at_least == self.lost_at_most:
            return f"{self.lost_at_most} are lost"
        return f"between {self.lost_at_least} and {self.lost_at_most} are lost"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def recover(target: str | Path | None, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Recovery | None:
    """Make a fresh store of what is readable in a damaged one. Return what was saved; None where nothing is damaged.

    Do not use the store meanwhile: what another process writes at the same time stays in the damaged file.

    Raises:
        UsageError: the store is no file.
        StoreError: it is missing, locked, foreign or newer; nothing was changed.
    """
    place = StoreTarget.of(target)
    if place.path is None:
        raise UsageError(
            f"{place.label} is on a server, and only a SQLite file can be recovered. Ask the administrator of the "
            "server."
        )
    _require_file(place)
    undo_killed_recoveries(place.path)
    if not _is_damaged(place.path, lock_timeout_seconds):
        return None
    found = _salvage_file(place.path)
    fresh = fresh_path(place.path)
    remove_fresh(fresh)
    try:
        bests, trials = _write_store(found, fresh)
        kept = exchange(place.path, fresh)
    finally:
        remove_fresh(fresh)
    left_out = len(found.bests) - bests + len(found.trials) - trials
    return Recovery(
        place=place.label,
        kept=str(kept),
        bests=bests,
        trials=trials,
        lost_at_least=found.lost_at_least + left_out,
        lost_at_most=None if found.lost_at_most is None else found.lost_at_most + left_out,
    )


def _salvage_file(path: Path) -> Salvaged:
    try:
        return salvage_rows(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"The database {path} cannot be read: {error.strerror}. Give yourself read permission, and try again."
    )


def _write_store(found: Salvaged, fresh: Path) -> tuple[int, int]:
    """Write a new store. Returns how many winners and trials it took: of two of one shape one stays."""
    with ResultStore.open(fresh) as store:
        counts = store.merge([Results(bests=found.bests, trials=found.trials)], trust=True)
    return counts.bests, counts.trials


def _require_file(place: StoreTarget) -> None:
    """Check that there may be a store to recover.

    Raises:
        StoreError: there is none, or it is a text, or it cannot be said.
    """
    path = place.path
    if place.is_missing or path is None:
        raise StoreError(f"No such store: {place.label}. `tune run` creates it.")
    if not path.is_file():  # a pipe would be read for ever
        raise StoreError(f"The store {path} is not a file. Correct --db or BLOCKTUNE_DB.")
    if _is_text(path):
        raise ForeignStoreError(
            f"{path} is a text file, and only a database can be recovered. `tune import` reads exports; correct --db "
            "or BLOCKTUNE_DB."
        )


def _is_damaged(path: Path, lock_timeout_seconds: float) -> bool:
    """Return whether the file, or any row that it holds, breaks a rule. A lock or a foreign file is no damage and
    raises."""
    try:
        # upgraded where it is older and sound enough
        with ResultStore.open(path, lock_timeout_seconds=lock_timeout_seconds) as store:
            return not store.health().sound
    except StoreCorruptError:
        return True


def _is_text(path: Path) -> bool:
    """Return whether the file begins as no database does, damaged or not: with nothing but text."""
    try:
        with open_file(path) as file:
            beginning = getincrementaldecoder("utf-8")().decode(file.read(512) or b"")
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return bool(beginning) and all(sign.isprintable() or sign.isspace() for sign in beginning)
