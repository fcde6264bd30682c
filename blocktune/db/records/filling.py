"""Checksums for rows that an older blocktune wrote."""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.orm import Session

from blocktune.db.records.reading import batches
from blocktune.db.records.row_checksums import device_checksum, record_checksum, served_checksum, served_user_checksum
from blocktune.db.records.rows import UNREADABLE, best_of, trial_of
from blocktune.db.records.user_rows import user_best_of, user_trial_of
from blocktune.db.tables.models import Base, BestRow, DeviceRow, TrialRow
from blocktune.db.tables.user_models import UserBestRow, UserTrialRow

Checksums = dict[str, str]


def fill_checksums(connection: Connection) -> None:
    """Give all rows their checksums that have none. A row that breaks a rule stays without, since it is not known what
    it said."""
    with Session(connection) as session:
        for row_type, checksums in _CHECKSUMS.items():
            table = row_type.metadata.tables[row_type.__tablename__]
            for rows in batches(session, select(row_type).where(table.c.checksum.is_(None)), table.c.id):
                filled = [values for row in rows if (values := _filled(row, checksums))]
                if filled:
                    names = [name for name in filled[0] if name != "row_id"]
                    statement = update(table).where(table.c.id == bindparam("row_id"))
                    connection.execute(statement.values({name: bindparam(name) for name in names}), filled)


def _filled(row: Any, checksums: Callable[[Any], Checksums]) -> dict[str, Any] | None:
    """Return the checksums of a row with its id; None for a row that breaks a rule."""
    try:
        return {"row_id": row.id, **checksums(row)}
    except UNREADABLE:
        return None


def _of_device(row: DeviceRow) -> Checksums:
    return {"checksum": device_checksum(row.document)}


def _of_trial(row: TrialRow) -> Checksums:
    return {"checksum": record_checksum(trial_of(row))}


def _of_best(row: BestRow) -> Checksums:
    best = best_of(row)
    return {"checksum": record_checksum(best), "served_checksum": served_checksum(best)}


def _of_user_trial(row: UserTrialRow) -> Checksums:
    return {"checksum": record_checksum(user_trial_of(row))}


def _of_user_best(row: UserBestRow) -> Checksums:
    best = user_best_of(row)
    return {"checksum": record_checksum(best), "served_checksum": served_user_checksum(best)}


_CHECKSUMS: Mapping[type[Base], Callable[[Any], Checksums]] = {
    DeviceRow: _of_device,
    TrialRow: _of_trial,
    BestRow: _of_best,
    UserTrialRow: _of_user_trial,
    UserBestRow: _of_user_best,
}
