"""The state of a store, for `tune doctor`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select, text
from sqlalchemy.orm import Session

from blocktune.db.records.reading import batches
from blocktune.db.records.row_values import UNREADABLE, whole_config, whole_device, whole_environment, whole_shape
from blocktune.db.records.rows import whole_best, whole_trial
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
from blocktune.db.tables.schema import version_of
from blocktune.db.tables.sqlite_file import log_of
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.files.foreign_text import shown

logger = logging.getLogger("blocktune")

MOST_ROWS_OF_A_SERVER = 20_000
"""Of each table that are looked at, the newest: those of a fleet would take an hour."""

MOST_CHECKED_BYTES = 16 << 20
"""Of a file that is checked before each command that reads it, which takes up to 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """place: path, or URL without password. server: `sqlite 3.45.1` or `postgresql 16.2`. journal_mode: SQLite's, which
    should be `wal`; empty elsewhere. integrity: `ok`, or what is wrong with pages, links and rows; empty for a server
    whose newest rows keep the rules. rows: by table."""

    place: str
    server: str
    journal_mode: str
    schema_version: str
    integrity: str
    size_bytes: int
    rows: dict[str, int]

    @property
    def sound(self) -> bool:
        return self.integrity in ("ok", "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def health_of(engines: StoreEngines) -> StoreHealth:
    """Return the state of this store; reads a whole file, and the newest rows of a server.

    Raises:
        StoreError: it cannot be read at all.
    """
    path = engines.target.path
    with translate_errors(engines.target), engines.reader.connect() as connection:
        return StoreHealth(
            place=engines.target.label,
            server=_server(connection),
            journal_mode="" if path is None else str(_pragma(connection, "journal_mode")[0]),
            schema_version=version_of(connection, engines.target) or "",
            integrity=_integrity(connection),
            size_bytes=_server_bytes(connection) if path is None else _file_bytes(path),
            rows={
                name: connection.execute(select(func.count()).select_from(table)).scalar_one()
                for name, table in sorted(Base.metadata.tables.items())
            },
        )


def warn_of_damage(engines: StoreEngines) -> None:
    """Say what is wrong with a file, unless it is large: without a word, an index that lost a row would hide it.

    Raises:
        StoreError: it cannot be read at all.
    """
    target = engines.target
    if target.path is None or _file_bytes(target.path) > MOST_CHECKED_BYTES:
        return
    with translate_errors(target), engines.reader.connect() as connection:
        (found,) = _pragma(connection, "integrity_check(1)")
    if found != "ok":
        logger.warning(
            "%s is damaged (%s), so that rows may be missing from what it answers. `tune doctor --recover` saves what "
            "can be read.",
            target.label,
            shown(str(found).splitlines()[-1]),
        )


def _integrity(connection: Connection) -> str:
    """Return `ok`, or empty for a server, or what is wrong: with the file, else with links between rows, else with
    rows."""
    is_file = connection.dialect.name == "sqlite"
    sound = ["ok"] if is_file else []
    pages = _pragma(connection, "integrity_check(10)") if is_file else []
    if pages != sound:
        return "; ".join(map(str, pages))
    broken = len(_pragma(connection, "foreign_key_check")) if is_file else 0
    links = [f"{broken} links between rows lead nowhere"] if broken else []
    return "; ".join([*links, *_broken_tables(connection)] or sound)


def _broken_tables(connection: Connection) -> Iterator[str]:
    """Yield what is wrong with the first row of each table that breaks a rule."""
    most = None if connection.dialect.name == "sqlite" else MOST_ROWS_OF_A_SERVER
    with Session(connection) as session:
        for row_type, convert in _READERS.items():
            try:
                for rows in batches(
                    session, select(row_type), row_type.metadata.tables[row_type.__tablename__].c.id, most
                ):
                    for row in rows:
                        convert(row)
            except UNREADABLE as error:
                yield f"a row of {row_type.__tablename__} breaks a rule ({error!s:.200})"


_READERS: Mapping[type[Base], Callable[[Any], object]] = {
    DeviceRow: whole_device,
    EnvironmentRow: whole_environment,
    KernelRow: bool,
    ShapeRow: whole_shape,
    ConfigRow: whole_config,
    TrialRow: whole_trial,
    BestRow: whole_best,
}
"""How a row of each table is made what it stands for. What only others refer to is checked with them."""


def _server(connection: Connection) -> str:
    version = connection.dialect.server_version_info or ()
    return f"{connection.dialect.name} {'.'.join(map(str, version))}"


def _pragma(connection: Connection, name: str) -> list[Any]:
    return [row[0] for row in connection.exec_driver_sql(f"PRAGMA {name}")]


def _file_bytes(path: Path) -> int:
    """Return the size of the file and of the commits that wait in its log."""
    wal = log_of(path)
    return path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)


def _server_bytes(connection: Connection) -> int:
    if connection.dialect.name != "postgresql":
        return 0
    return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
