"""What can still be read of a damaged store, in a fresh one beside which the damaged one is kept.

Rows of people's own kernels are copied as they are where SQLite can read them: who loads them checks them.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, func, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from blocktune.db.exchange.merging import Results
from blocktune.db.records.bounds import require_sound_environment
from blocktune.db.records.records import Best, Environment, Trial
from blocktune.db.records.rows import (
    UNREADABLE,
    RowWriter,
    best_of,
    device_of,
    environment_of,
    trial_of,
)
from blocktune.db.store import ResultStore
from blocktune.db.tables.engine import LOCK_TIMEOUT_SECONDS, open_engines, translated
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.models import BestRow, ConfigRow, DeviceRow, EnvironmentRow, KernelRow, ShapeRow, TrialRow
from blocktune.db.tables.user_models import UserBestRow, UserTrialRow
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import ForeignStoreError, StoreCorruptError, StoreError, UsageError

SMALLEST_ROW_BYTES = 128
"""No trial of a store is smaller: so many ids are tried where the highest one cannot be read."""

MAX_UNREADABLE = 20_000
"""Rows that are tried one by one before the rest of a table is given up."""

_DAMAGED = (DBAPIError, sqlite3.Error, *UNREADABLE)
"""What reading a damaged row, or making a record of it, can raise."""

_DIMENSIONS = (DeviceRow, EnvironmentRow, KernelRow, ShapeRow, ConfigRow)

Record = TypeVar("Record", Trial, Best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What was saved.

    kept: where the damaged file is now. user_rows: trials and winners of people's own kernels. lost: how many trials
    and winners are lost at most: every id that cannot be read may have been one, and every row that breaks a rule was.
    """

    place: str
    kept: str
    bests: int
    trials: int
    user_rows: int
    lost: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def recover(target: str | Path | None, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Recovery | None:
    """Makes a fresh store of what is readable in a damaged one; None where nothing is damaged.

    Nobody should use the store meanwhile: what another process writes at the same time stays in the damaged file.

    Raises:
        UsageError: the store is no file.
        StoreError: it is missing, locked, foreign or newer; nothing was changed.
    """
    place = StoreTarget.of(target)
    if place.path is None:
        raise UsageError(
            f"Only a SQLite file can be recovered, but {place.label} is a server's. Ask its administrator."
        )
    if not _is_damaged(place.path, lock_timeout_seconds):
        return None
    salvaged = _salvaged(place)
    fresh = place.path.with_name(f".{place.path.name}.recovering-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        with ResultStore.open(fresh) as store:
            store.merge([salvaged.results], trust=True)
        user_rows = _copy(salvaged.user_rows, fresh)
        kept = _exchange(place.path, fresh)
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{fresh}{suffix}").unlink(missing_ok=True)
    return Recovery(
        place=place.label,
        kept=str(kept),
        bests=len(salvaged.results.bests),
        trials=len(salvaged.results.trials),
        user_rows=user_rows,
        lost=salvaged.lost + len(salvaged.user_rows) - user_rows,
    )


def _is_damaged(path: Path, lock_timeout_seconds: float) -> bool:
    """Whether the file, or any row that it holds, breaks a rule. A lock or a foreign file is no damage and raises."""
    if not path.exists():
        raise StoreError(f"A store must exist to be recovered, but there is no {path}. `tune run` creates it.")
    if _is_text(path):
        raise ForeignStoreError(
            f"Only a database can be recovered, but {path} is a text file. `tune import` reads exports; correct --db "
            "or BLOCKTUNE_DB."
        )
    try:
        # upgraded where it is older and sound enough
        with ResultStore.open(path, lock_timeout_seconds=lock_timeout_seconds) as store:
            if not store.health().sound:
                return True
            store.bests()
            store.trials()
            store.devices()
    except StoreCorruptError:
        return True
    return False


def _is_text(path: Path) -> bool:
    """Whether the file begins as no database does, damaged or not: with nothing but text."""
    try:
        with path.open(encoding="utf-8") as file:
            beginning = file.read(512)
    except UnicodeDecodeError:
        return False
    return bool(beginning) and all(sign.isprintable() or sign.isspace() for sign in beginning)


def _exchange(path: Path, fresh: Path) -> Path:
    """Puts the fresh file in the place of the damaged one, which is kept with the commits that waited beside it."""
    kept = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S}")
    try:
        for suffix in ("-wal", "-shm", ""):
            if Path(f"{path}{suffix}").exists():
                os.rename(f"{path}{suffix}", f"{kept}{suffix}")
        fresh.replace(path)
    except OSError as error:
        raise StoreError(
            f"A recovery needs to rename files in {path.parent}, but cannot: {error.strerror}. "
            f"What was there is in {path.name} or {kept.name}; give the directory write permission and try again."
        ) from error
    return kept


@dataclass(frozen=True, slots=True)
class _UserRow:
    """A trial or winner of somebody's own kernel, with what its ids stood for."""

    row_type: type[UserTrialRow] | type[UserBestRow]
    values: dict[str, Any]
    device: DeviceSpec
    environment: Environment


@dataclass(frozen=True, slots=True)
class _Salvaged:
    """All that can be made of readable rows, and how many rows could not be read."""

    results: Results = field(default_factory=Results)
    user_rows: tuple[_UserRow, ...] = ()
    lost: int = 0


class _Copier(RowWriter):
    """Writes rows of people's own kernels into a store that has none."""

    def copy(self, row: _UserRow) -> bool:
        """Returns whether the row keeps the rules of its table."""
        links = {
            "device_id": self._device(row.device),
            "environment_id": self._environment(row.environment),
        }
        try:
            with self._session.begin_nested():
                self._session.add(row.row_type(**row.values | links))
        except DBAPIError:
            return False
        return True


def _copy(rows: Sequence[_UserRow], path: Path) -> int:
    """Writes the rows to a fresh store and returns how many it took."""
    place = StoreTarget(path=path)
    engines = open_engines(place, read_only=False, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS)
    with translated(place), Session(engines.writer) as session, session.begin():
        copier = _Copier(session)
        return sum(copier.copy(row) for row in rows)


def _salvaged(place: StoreTarget) -> _Salvaged:
    assert place.path is not None
    try:
        engines = open_engines(place, read_only=True, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS)
        with translated(place), engines.reader.connect() as connection:
            salvage = _Salvage(connection, highest_id=place.path.stat().st_size // SMALLEST_ROW_BYTES)
            bests, trials = salvage.records(BestRow, best_of), salvage.records(TrialRow, trial_of)
            own = (*salvage.user_rows(UserTrialRow), *salvage.user_rows(UserBestRow))
            return _Salvaged(Results(bests=tuple(bests), trials=tuple(trials)), own, salvage.lost)
    except StoreCorruptError:  # not one table can be opened
        return _Salvaged()


class _Salvage:
    """Reads tables in ever smaller ranges of ids, around what is damaged."""

    def __init__(self, connection: Connection, highest_id: int) -> None:
        self.lost = 0
        self._connection = connection
        self._highest_id = highest_id
        self._tries = MAX_UNREADABLE
        self._tables = set(inspect(connection).get_table_names())
        # Indices may be damaged while their table is not, so every table is read by its ids alone.
        self._dimensions: dict[Any, dict[int, Any]] = {
            row_type: {values["id"]: row_type(**values) for values in self._rows(row_type)} for row_type in _DIMENSIONS
        }
        self.lost = 0  # a lost dimension is counted where a trial or winner needs it

    def records(self, row_type: type[TrialRow] | type[BestRow], convert: Callable[[Any], Record]) -> list[Record]:
        found = []
        for values in self._rows(row_type):
            try:
                found.append(convert(self._linked(row_type, values)))
            except _DAMAGED:
                self.lost += 1
        return found

    def user_rows(self, row_type: type[UserTrialRow] | type[UserBestRow]) -> Iterator[_UserRow]:
        for values in self._rows(row_type):
            try:
                device = device_of(self._dimensions[DeviceRow][values.pop("device_id")])
                environment = environment_of(self._dimensions[EnvironmentRow][values.pop("environment_id")])
                require_sound_environment(environment)
            except _DAMAGED:
                self.lost += 1
                continue
            del values["id"]
            yield _UserRow(row_type, values, device, environment)

    def _linked(self, row_type: type[TrialRow] | type[BestRow], values: dict[str, Any]) -> TrialRow | BestRow:
        """The row with its device, shape and so on, by their ids."""
        row = row_type(**values)
        row.device = self._dimensions[DeviceRow][values["device_id"]]
        row.environment = self._dimensions[EnvironmentRow][values["environment_id"]]
        row.kernel = self._dimensions[KernelRow][values["kernel_id"]]
        row.shape = self._dimensions[ShapeRow][values["shape_id"]]
        configs = self._dimensions[ConfigRow]
        row.config = configs[values["config_id"]]
        if isinstance(row, BestRow):
            row.default_config = configs.get(values["default_config_id"])
            row.paper_config = configs.get(values["paper_config_id"])
        return row

    def _rows(self, row_type: Any) -> Iterator[dict[str, Any]]:
        table = row_type.__table__
        if table.name not in self._tables:  # an older schema that is too damaged to be upgraded
            return
        try:
            highest = self._connection.execute(select(func.max(table.c.id))).scalar_one() or 0
        except _DAMAGED:
            highest = self._highest_id
        yield from self._between(table, 1, highest)

    def _between(self, table: Any, low: int, high: int) -> Iterator[dict[str, Any]]:
        """The readable rows of a range; where it cannot be read as a whole, those of its halves."""
        if low > high or self._tries <= 0:
            return
        try:
            query = select(table).where(table.c.id.between(low, high))
            found = [dict(row) for row in self._connection.execute(query).mappings()]
        except _DAMAGED:
            if low == high:
                self.lost += 1
                self._tries -= 1
                return
            middle = (low + high) // 2
            yield from self._between(table, low, middle)
            yield from self._between(table, middle + 1, high)
        else:
            yield from found
