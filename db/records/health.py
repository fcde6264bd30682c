"""The state of a store, for `tune doctor`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select, text

from blocktune.db.tables.engine import StoreEngines, translated
from blocktune.db.tables.models import Base
from blocktune.db.tables.schema import version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """place: path, or URL without password. server: `sqlite 3.45.1` or `postgresql 16.2`. journal_mode: SQLite's, which
    should be `wal`; empty elsewhere. integrity: `ok`, or what SQLite's quick check found; empty elsewhere. rows: by
    table."""

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
    """The state of this store; reads the whole file.

    Raises:
        StoreError: it cannot be read at all.
    """
    path = engines.target.path
    with translated(engines.target), engines.reader.connect() as connection:
        return StoreHealth(
            place=engines.target.label,
            server=_server(connection),
            journal_mode="" if path is None else str(_pragma(connection, "journal_mode")[0]),
            schema_version=version_of(connection, engines.target) or "",
            integrity="" if path is None else "; ".join(map(str, _pragma(connection, "quick_check(10)"))),
            size_bytes=_server_bytes(connection) if path is None else _file_bytes(path),
            rows={
                name: connection.execute(select(func.count()).select_from(table)).scalar_one()
                for name, table in sorted(Base.metadata.tables.items())
            },
        )


def _server(connection: Connection) -> str:
    version = connection.dialect.server_version_info or ()
    return f"{connection.dialect.name} {'.'.join(map(str, version))}"


def _pragma(connection: Connection, name: str) -> list[Any]:
    return [row[0] for row in connection.exec_driver_sql(f"PRAGMA {name}")]


def _file_bytes(path: Path) -> int:
    """The file and the commits that wait beside it."""
    wal = path.with_name(path.name + "-wal")
    return path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)


def _server_bytes(connection: Connection) -> int:
    if connection.dialect.name != "postgresql":
        return 0
    return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
