"""Reads a store's records from its damaged file, without the schema in that file.

What the pages hold is laid into a store of our own schema in memory, with the ids that it had, and read from there by
the rules for every store. A row that breaks one is lost, and counted.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Engine, String, Table, create_engine, select
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from blocktune.db.migrations.user_rows import OLD, move_user_rows
from blocktune.db.records.correction import correct
from blocktune.db.records.filling import renew_checksums
from blocktune.db.records.records import AnyBest, AnyTrial
from blocktune.db.records.row_values import UNREADABLE
from blocktune.db.records.rows import best_of, trial_of
from blocktune.db.recovery.page_file import PageFile
from blocktune.db.recovery.page_walk import FileWalk, FoundRecord, walk
from blocktune.db.tables.models import Base, BestRow, TrialRow
from blocktune.db.tables.schema import CURRENT
from blocktune.kernels.values.errors import SchemaTooNewError

SMALLEST_ROW_BYTES = 60
"""No trial or winner of a store takes less of a page."""

TABLES = (*Base.metadata.tables.values(), *OLD.tables.values())
"""Of this version's files, and of older ones."""

RESULT_TABLES = ("trial", "best", *OLD.tables)

Place = tuple[str, int]
"""A row's table and id."""

Row = TypeVar("Row", TrialRow, BestRow)
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Salvaged:
    """Hold what could be read of trials and winners.

    lost_at_least: how many were seen and cannot be kept.
    lost_at_most: lost_at_least plus what may have stood where nothing can be read; None where that is unknown.
    """

    trials: tuple[AnyTrial, ...]
    bests: tuple[AnyBest, ...]
    lost_at_least: int
    lost_at_most: int | None


def salvage_rows(path: Path) -> Salvaged:
    """Return all trials and winners that can be read of a store's file and its write-ahead log. Changes neither.

    Raises:
        SchemaTooNewError: a newer blocktune wrote it.
        OSError: the file cannot be read.
    """
    with PageFile(path) as file:
        found = walk(file, smallest_record_bytes=SMALLEST_ROW_BYTES)
    _require_known_version(found, path)
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as memory:
        memory.text_factory = partial(str, encoding="utf-8", errors="replace")
        engine = create_engine("sqlite://", creator=lambda: memory, poolclass=StaticPool)
        with engine.begin() as connection:
            Base.metadata.create_all(connection)
            OLD.create_all(connection)
            connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
            places = _insert_records(connection, found.records)
            move_user_rows(connection)
            renew_checksums(connection)
        correct(memory)
        memory.commit()
        records = _Records(engine)
        trials = records.of(TrialRow, trial_of)
        bests = records.of(BestRow, best_of)
    lost = _results(places) - len(trials) - len(bests)
    repeated = _results(places.elements()) - _results(places)
    freed = _results(_places_of(found.freed).keys() - places.keys())  # deleted, unless the list of free pages is wrong
    most = None if found.incomplete else lost + repeated + freed + found.hidden
    return Salvaged(tuple(trials), tuple(bests), lost, most)


def table_of(values: tuple[Any, ...]) -> Table | None:
    """Return the table of ours that a record belongs to, by the number and kinds of its values; None if it is no
    table's.

    SQLite writes NULL for an id, since the record's own number stands for it.
    """
    if not values or values[0] is not None:
        return None
    fitting = [table for table in TABLES if _may_have(table, len(values))]
    return max(fitting, key=lambda table: _count_fitting(table, values), default=None)


def _may_have(table: Table, count: int) -> bool:
    """Return whether a record of the table can have this many values: columns that came later may be missing in old
    ones."""
    later = sum(column.server_default is not None for column in table.columns)
    return len(table.columns) - later <= count <= len(table.columns)


def _count_fitting(table: Table, values: tuple[Any, ...]) -> int:
    return sum(_fits(column, value) for column, value in zip(table.columns, values, strict=False))


def _fits(column: Column[Any], value: Any) -> bool:
    if value is None:
        return bool(column.nullable)
    return isinstance(
        value, str if isinstance(column.type, String) else int if column.type.python_type is int else object
    )


def _require_known_version(found: FileWalk, path: Path) -> None:
    for record in found.records:
        version = record.values[0] if len(record.values) == 1 else None
        if isinstance(version, str) and version.isdecimal() and len(version) == len(CURRENT) and version > CURRENT:
            raise SchemaTooNewError(
                f"This blocktune reads schemas up to {CURRENT}, but {path} has schema {version}. "
                "Update blocktune (`pip install --upgrade blocktune`), then recover again."
            )


def _insert_records(connection: Connection, records: Iterable[FoundRecord]) -> Counter[Place]:
    """Write records into the tables that they belong to. Returns how often each of their places came up: of several
    records of one place the first one counts."""
    places: Counter[Place] = Counter()
    for record in records:
        table = table_of(record.values)
        if table is None:
            continue
        places[table.name, record.rowid] += 1
        if places[table.name, record.rowid] == 1:
            names = [column.name for column in table.columns][: len(record.values)]
            values = (record.rowid, *map(_bytes_of, record.values[1:]))
            marks = ", ".join(map(_mark, (None, *record.values[1:])))
            statement = f"INSERT OR IGNORE INTO {table.name} ({', '.join(names)}) VALUES ({marks})"
            connection.exec_driver_sql(statement, values)
    return places


def _bytes_of(value: Any) -> Any:
    """Return a text as its bytes, which may be no UTF-8."""
    return value.encode("utf-8", errors="surrogateescape") if isinstance(value, str) else value


def _mark(value: Any) -> str:
    return "CAST(? AS TEXT)" if isinstance(value, str) else "?"


def _places_of(records: Iterable[FoundRecord]) -> Counter[Place]:
    tables = ((table_of(record.values), record.rowid) for record in records)
    return Counter((table.name, rowid) for table, rowid in tables if table is not None)


def _results(places: Iterable[Place]) -> int:
    """Return how many of the places are those of trials and winners."""
    return sum(table in RESULT_TABLES for table, _ in places)


class _Records:
    """The records of a store whose rows may break any rule."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def of(self, row_type: type[Row], convert: Callable[[Row], Record]) -> list[Record]:
        """Return the records of all rows that keep the rules."""
        with Session(self._engine) as session:
            ids = list(session.scalars(select(row_type.id).order_by(row_type.id)))
            return list(self._readable(session, row_type, convert, ids))

    def _readable(
        self, session: Session, row_type: type[Row], convert: Callable[[Row], Record], ids: list[int]
    ) -> Iterator[Record]:
        """Yield those of some rows, all at once where none breaks a rule, else half by half."""
        if not ids:
            return
        try:
            query = select(row_type).where(row_type.id.between(ids[0], ids[-1]))
            found = [convert(row) for row in session.scalars(query)]
        except UNREADABLE:
            middle = len(ids) // 2
            for half in (ids[:middle], ids[middle:]) if middle else ():
                yield from self._readable(session, row_type, convert, half)
        else:
            yield from found
