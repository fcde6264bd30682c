"""Rows that a store can do without: trials that no new one can be compared with."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass

from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select

from blocktune.db.tables.engine import StoreEngines
from blocktune.db.tables.models import (
    Base,
    BestRow,
    ConfigRow,
    DeviceRow,
    EnvironmentRow,
    KernelRow,
    ShapeRow,
    TrialRow,
)
from blocktune.db.tables.sqlite_file import connect_sqlite

_PARENTS = tuple(row_type.__tablename__ for row_type in (DeviceRow, ShapeRow, KernelRow, EnvironmentRow, ConfigRow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Say which trials are comparable.

    source_hashes: the hashes of the present kernels, by name. Kernels of other names are left alone, since they may
        be a user's.
    protocol: the version of the measuring protocol of attention.
    """

    source_hashes: Mapping[str, str]
    protocol: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanCounts:
    """dead_kernel: trials of a kernel whose source has changed. old_protocol: trials of the present source that an
    older protocol measured. trials and bests: what stays. unreferenced: rows that only dropped trials referred to, of
    all other tables. bytes_before and bytes_after: the SQLite file; 0 on a server, equal in a dry run."""

    dead_kernel: int
    old_protocol: int
    trials: int
    bests: int
    unreferenced: int
    bytes_before: int
    bytes_after: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def clean(engines: StoreEngines, rules: Rules, *, dry_run: bool) -> CleanCounts:
    """Drop what the rules call incomparable in one transaction, then give the space back to the disk.

    In a dry run the same is done and taken back, so that its counts are the true ones.
    """
    before = _size_bytes(engines)
    with engines.writer.connect() as connection, connection.begin() as transaction:
        counts = _drop(connection, rules)
        if dry_run:
            transaction.rollback()
    if not dry_run:
        _shrink(engines)
    return CleanCounts(**counts, bytes_before=before, bytes_after=before if dry_run else _size_bytes(engines))


def _drop(connection: Connection, rules: Rules) -> dict[str, int]:
    dead = _delete_trials(connection, TrialRow.kernel_id.in_(select(KernelRow.id).where(_is_dead(rules))))
    older = select(EnvironmentRow.id).where(EnvironmentRow.protocol < rules.protocol)
    attention = select(ShapeRow.id).where(ShapeRow.direction.is_not(None))
    old = _delete_trials(connection, TrialRow.environment_id.in_(older), TrialRow.shape_id.in_(attention))
    return {
        "dead_kernel": dead,
        "old_protocol": old,
        "trials": _count(connection, TrialRow),
        "bests": _count(connection, BestRow),
        "unreferenced": sum(_drop_unreferenced(connection, name) for name in _PARENTS),
    }


def _is_dead(rules: Rules) -> ColumnElement[bool]:
    changed = (
        and_(KernelRow.name == name, KernelRow.source_hash != source_hash)
        for name, source_hash in rules.source_hashes.items()
    )
    return or_(False, *changed)


def _delete_trials(connection: Connection, *conditions: ColumnElement[bool]) -> int:
    return connection.execute(delete(TrialRow).where(*conditions)).rowcount


def _drop_unreferenced(connection: Connection, name: str) -> int:
    tables = Base.metadata.tables
    parent = tables[name]
    links = [key.parent for table in tables.values() for key in table.foreign_keys if key.column.table is parent]
    unused = [parent.c.id.not_in(select(link).where(link.is_not(None))) for link in links]
    return connection.execute(delete(parent).where(*unused)).rowcount


def _count(connection: Connection, row_type: type[TrialRow] | type[BestRow]) -> int:
    return connection.execute(select(func.count()).select_from(row_type)).scalar_one()


def _size_bytes(engines: StoreEngines) -> int:
    path = engines.target.path
    return 0 if path is None else path.stat().st_size


def _shrink(engines: StoreEngines) -> None:
    """Rewrite a SQLite file while no other process writes to it; a server reuses the space by itself."""
    path = engines.target.path
    if path is None:
        return
    with closing(connect_sqlite(f"{path.as_uri()}?mode=rw", engines.lock_timeout_seconds)) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
