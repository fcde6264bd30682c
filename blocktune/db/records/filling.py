"""Checksums for rows that an older blocktune wrote: without any, or of an autotuned kernel in a table of its own."""

from collections.abc import Callable, Mapping
from datetime import UTC
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, select, update
from sqlalchemy.orm import Session

from blocktune.db.records.reading import ROWS_AT_ONCE, read_by_halves
from blocktune.db.records.records import Record
from blocktune.db.records.row_checksums import device_checksum, record_checksum, served_checksum
from blocktune.db.records.row_values import document_of, whole_device
from blocktune.db.records.rows import best_of, trial_of, unverified_best, unverified_trial
from blocktune.db.tables.models import Base, BestRow, DeviceRow, ShapeRow, TrialRow
from blocktune.kernels.files.checksums import checksum_of
from blocktune.kernels.files.json_pieces import canonical_text

Checksums = dict[str, str]


def upgrade_checksums(connection: Connection) -> None:
    """Give the rows of an older schema the checksums of the present one."""
    renew_checksums(connection)
    fill_checksums(connection)


def fill_checksums(connection: Connection) -> None:
    """Give all rows their checksums that have none. A row that breaks a rule stays without, since it is not known what
    it said."""
    with Session(connection) as session:
        for row_type, checksums in _CHECKSUMS.items():
            table = row_type.metadata.tables[row_type.__tablename__]
            _give(session, table, select(row_type).where(table.c.checksum.is_(None)), checksums)


def renew_checksums(connection: Connection) -> None:
    """Give rows of `user_trial` and `user_best`, which schema 8 has moved, checksums of what they are now. A row that
    does not agree with the one that it has was changed before, and keeps it."""
    with Session(connection) as session:
        for row_type, checksums in _RENEWED.items():
            table = row_type.metadata.tables[row_type.__tablename__]
            moved = select(row_type).join(row_type.shape).where(ShapeRow.direction.is_(None))
            _give(session, table, moved.where(table.c.checksum.is_not(None)), checksums)


def _give(session: Session, table: Table, query: Select[Any], checksums: Callable[[Any], Checksums]) -> None:
    """Write the checksums of a query's rows, as far as there are some."""

    def keep(row_id: int, error: Exception) -> None:
        """Leave a row that breaks a rule as it is."""

    def given(row: Any) -> dict[str, Any]:
        return {"row_id": row.id, **checksums(row)}

    rows = read_by_halves(session, query, table.c.id, given, keep)
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        if found := [values for values in batch if len(values) > 1]:
            names: dict[str, Any] = {name: bindparam(name) for name in found[0] if name != "row_id"}
            session.connection().execute(update(table).where(table.c.id == bindparam("row_id")).values(**names), found)


def _device_checksums(row: DeviceRow) -> Checksums:
    whole_device(row)  # which raises where the document is no device
    return {"checksum": device_checksum(row.document)}


def _trial_checksums(row: TrialRow) -> Checksums:
    return {"checksum": record_checksum(trial_of(row))}


def _best_checksums(row: BestRow) -> Checksums:
    best = best_of(row)
    return {"checksum": record_checksum(best), "served_checksum": served_checksum(best)}


_CHECKSUMS: Mapping[type[Base], Callable[[Any], Checksums]] = {
    DeviceRow: _device_checksums,
    TrialRow: _trial_checksums,
    BestRow: _best_checksums,
}


def _moved_trial_checksums(row: TrialRow) -> Checksums:
    trial = unverified_trial(row)
    telemetry = {
        name: getattr(trial.telemetry, name)
        for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons", "other_processes")
    }
    told = {
        "outcome": str(trial.outcome),
        "error": trial.error or None,
        "time_us": trial.time_us,
        "relative_to_anchor": trial.relative_to_anchor,
        "samples_us": trial.samples_us or None,
        "seconds": trial.compile_seconds or None,
    }
    return {"checksum": record_checksum(trial)} if _former_checksum(trial, told | telemetry) == row.checksum else {}


def _moved_best_checksums(row: BestRow) -> Checksums:
    best = unverified_best(row)
    told = {
        "default": None if best.default is None else document_of(best.default),
        "time_us": best.time_us,
        "default_time_us": best.default_time_us,
        "speedup_over_default": best.speedup_over_default,
        "speedup_low": best.speedup_low,
        "speedup_high": best.speedup_high,
        "trials": best.trials or None,
    }
    return {"checksum": record_checksum(best)} if _former_checksum(best, told) == row.checksum else {}


def _former_checksum(record: Record, told: Mapping[str, Any]) -> str:
    """Return the checksum of a record in the tables of before, which left out what was at its default."""
    shared = {
        "gpu_uuid": record.device.uuid,
        "device": record.device.key,
        "environment": canonical_text(record.environment.to_json()),
        "problem": document_of(record.shape),
        "config": document_of(record.config),
        "source_hash": record.kernel_hash,
        "created_at": record.created_at.astimezone(UTC).isoformat(),
    }
    return checksum_of(shared | dict(told))


_RENEWED: Mapping[type[TrialRow | BestRow], Callable[[Any], Checksums]] = {
    TrialRow: _moved_trial_checksums,
    BestRow: _moved_best_checksums,
}
