"""Reads many rows as records, each of which is checked by the rules of its record first."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, ScalarSelect, Select, select
from sqlalchemy.orm import Session

from blocktune.db.records.row_values import UNREADABLE
from blocktune.db.tables.models import Base
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.values.errors import StoreCorruptError

logger = logging.getLogger("blocktune")

Record = TypeVar("Record")

ROWS_AT_ONCE = 1000
_MAX_NAMED = 5
"""Rows that a warning names."""


def joined_rows(session: Session, query: Select[Any]) -> Iterable[Any]:
    """Return the rows of a query, each joined to those that it refers to: by one statement, which is best for few."""
    return session.scalars(query)


def readable_records(
    session: Session,
    query: Select[Any],
    convert: Callable[[Any], Record],
    place: str,
    rows_of: Callable[[Session, Select[Any]], Iterable[Any]] = joined_rows,
) -> list[Record]:
    """Return the records of rows. A row that is not what was written is left out, and named in a warning.

    Args:
        session: of the store.
        query: selects rows of one table.
        convert: makes the record of a row.
        place: the store, as people may see it.
        rows_of: reads the rows where none is broken: `joined_rows`, or `linked_rows` for thousands.

    Raises:
        StoreCorruptError: a row without a checksum breaks a rule: it cannot be said whether it ever kept it.
    """
    reading = _Reading(session, query, convert, place, rows_of)
    found = list(reading.records())
    if reading.changed:
        rows = ", ".join(map(str, reading.changed[:_MAX_NAMED])) + (" ..." if len(reading.changed) > _MAX_NAMED else "")
        logger.warning(
            "%d row(s) of `%s` in %s are not as they were written and are left out: %s. "
            "`tune doctor --recover` saves the others.",
            len(reading.changed),
            reading.row_type.__tablename__,
            place,
            rows,
        )
    return found


def id_of(row_type: type[Base], **key: str) -> ScalarSelect[int]:
    """Return a query for the id of the row with this key, to be a condition in another query.

    It is looked up once and first, so that the rows that refer to it are found by an index; joined to them, it would be
    one table more whose order the planner of a server has to choose.
    """
    return select(row_type.metadata.tables[row_type.__tablename__].c.id).filter_by(**key).scalar_subquery()


def batches(
    session: Session, query: Select[Any], row_id: ColumnElement[int], most: int | None = None
) -> Iterator[list[Any]]:
    """Yield the rows of a query a thousand at a time, the newest first: a server's table may not fit the memory.

    Args:
        session: of the store. It forgets each batch after its turn.
        query: selects rows of one table.
        row_id: their column that grows with time.
        most: how many rows are read in all; None for every one.
    """
    seen, least = 0, None
    while most is None or seen < most:
        size = ROWS_AT_ONCE if most is None else min(ROWS_AT_ONCE, most - seen)
        older = query if least is None else query.where(row_id < least)
        rows = list(session.scalars(older.order_by(row_id.desc()).limit(size)))
        if not rows:
            return
        seen, least = seen + len(rows), rows[-1].id
        yield rows
        session.expunge_all()


def read_by_halves(
    session: Session,
    query: Select[Any],
    row_id: ColumnElement[int],
    convert: Callable[[Any], Record],
    leave_out: Callable[[int, Exception], None],
) -> Iterator[Record]:
    """Yield the records of rows some of which are broken, half by half: what breaks a driver's rule ends a query.

    Args:
        session: of the store.
        query: selects rows of one table.
        row_id: their column that is their key.
        convert: makes the record of a row.
        leave_out: is called with the id of a broken row and its error.
    """

    def records(ids: Sequence[int]) -> Iterator[Record]:
        try:
            found = [convert(row) for row in session.scalars(query.where(row_id.in_(ids)))]
        except UNREADABLE as error:
            if len(ids) == 1:
                leave_out(ids[0], error)
                return
            middle = len(ids) // 2
            yield from records(ids[:middle])
            yield from records(ids[middle:])
        else:
            yield from found

    ids = list(session.scalars(query.with_only_columns(row_id)))
    for start in range(0, len(ids), ROWS_AT_ONCE):
        yield from records(ids[start : start + ROWS_AT_ONCE])


@dataclass
class _Reading(Generic[Record]):
    """Reads all rows at once where none is broken, else half by half."""

    session: Session
    query: Select[Any]
    convert: Callable[[Any], Record]
    place: str
    rows_of: Callable[[Session, Select[Any]], Iterable[Any]]
    changed: list[int] = field(default_factory=list)

    @property
    def row_type(self) -> Any:
        return self.query.column_descriptions[0]["entity"]

    def records(self) -> Iterator[Record]:
        try:
            yield from [self.convert(row) for row in self.rows_of(self.session, self.query)]
        except UNREADABLE:
            yield from read_by_halves(self.session, self.query, self.row_type.id, self.convert, self._leave_out)

    def _leave_out(self, row_id: int, error: Exception) -> None:
        checksum = self.session.scalar(select(self.row_type.checksum).where(self.row_type.id == row_id))
        if checksum is None:
            raise StoreCorruptError(
                f"A row in {self.place} holds a value that blocktune did not write: {shown(str(error), 500)} `tune "
                "doctor --recover` saves the other rows."
            ) from error
        self.changed.append(row_id)
