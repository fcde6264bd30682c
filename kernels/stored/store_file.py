"""The store as production reads it: one SQLite file, read-only, by the standard library.

The database room owns the tables; it keeps a view `dispatch` for this reader, with one row for each best. Nothing here
waits: a store that does not answer within `READ_SECONDS` is a problem to report, not a reason to stall a model.
"""

import os
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktune.kernels.stored.export_file import SUFFIX
from blocktune.kernels.stored.fork_gate import GatedConnection
from blocktune.kernels.values.errors import (
    ForeignStoreError,
    SchemaTooNewError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
)

NEWEST_SCHEMA = 4
"""The newest schema version whose `dispatch` view is known to mean what this reader takes it for."""

BUSY_SECONDS = 0.02
READ_SECONDS = 0.04  # all of the reading; the dispatcher promises to lose less than 50 ms to its store
MAX_ROWS = 4096
_STEPS_BETWEEN_CHECKS = 1000  # SQLite's virtual machine runs about 1e8 of them a second

_QUERY = """
    SELECT *, shape_json AS shape, config_json AS config
    FROM dispatch WHERE device_key LIKE ? LIMIT ?
"""  # all columns, since the view of older schemas lacks some


def user_store_path() -> Path:
    """The user's own store: BLOCKTUNE_DB, or `blocktune/blocktune.db` in the user's data directory.

    Raises:
        StoreError: BLOCKTUNE_DB names a server, which this reader does not speak to, or a results file.
    """
    place = user_place()
    if place.name.endswith(SUFFIX):
        raise StoreError(
            f"A store is a SQLite file, but BLOCKTUNE_DB names the results file {place}. Give a store's path."
        )
    return place


def user_place() -> Path:
    """The store or results file that BLOCKTUNE_DB names, or the store in the user's data directory.

    Raises:
        StoreError: BLOCKTUNE_DB names a server.
    """
    named = os.environ.get("BLOCKTUNE_DB", "")
    scheme, is_url, place = named.partition("://")
    if is_url and scheme.split("+")[0] != "sqlite":
        raise StoreError(
            f"The dispatcher reads SQLite files only, and results files, but BLOCKTUNE_DB is a {scheme} URL. "
            "Freeze its results with `tune freeze` and name that file, or pass a source of your own to `Dispatcher`."
        )
    if is_url:
        named = place.removeprefix("/")  # three slashes lead a relative path, four an absolute one
    return Path(named).expanduser() if named else _data_directory() / "blocktune" / "blocktune.db"


def _data_directory() -> Path:
    """XDG_DATA_HOME, unless it is relative: then it would follow the working directory, and the XDG Base Directory
    Specification has it ignored."""
    named = Path(os.environ.get("XDG_DATA_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".local" / "share"


@dataclass(frozen=True, slots=True)
class SqliteRows:
    """The rows of a view of a store, by a query that takes a pattern of device keys and the highest number of rows."""

    path: Path
    query: str = _QUERY

    def read(self, compute_capability: str) -> list[Mapping[str, Any]]:
        """The rows of all devices of a compute capability, such as `9.0`.

        Raises:
            StoreError: the file is missing, locked, damaged, foreign or slow; the message says which and what to do.
        """
        if not self.path.is_file():  # also keeps a pipe from blocking the open
            raise StoreError(
                f"The store is a file, but {self.path} is missing. "
                "`tune run` creates it; until then untuned configs are used."
            )
        try:
            return self._read_either_way(compute_capability)
        except sqlite3.Error as error:
            raise _explained(error, self.path) from error
        except UnicodeDecodeError as error:  # SQLite's own message repeats a damaged name
            raise _corrupt(error, self.path) from error

    def _read_either_way(self, compute_capability: str) -> list[Mapping[str, Any]]:
        """First with locks. A write-ahead store on read-only media cannot take them; `immutable` reads it without,
        which is right only while no rows wait in the log."""
        try:
            return self._query(compute_capability, "mode=ro")
        except sqlite3.OperationalError as error:
            unlockable = error.sqlite_errorname.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN"))
            if not unlockable or self._rows_in_log():
                raise
            return self._query(compute_capability, "mode=ro&immutable=1")

    def _rows_in_log(self) -> bool:
        log = Path(f"{self.path}-wal")
        return log.exists() and log.stat().st_size > 0

    def _query(self, compute_capability: str, options: str) -> list[Mapping[str, Any]]:
        deadline = time.monotonic() + READ_SECONDS
        uri = f"{self.path.absolute().as_uri()}?{options}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, factory=GatedConnection)
        try:
            connection.row_factory = sqlite3.Row
            connection.text_factory = _lenient_text
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_BETWEEN_CHECKS)
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            _require_known_schema(connection, self.path)
            rows = connection.execute(self.query, (f"%|{compute_capability}|%", MAX_ROWS)).fetchall()
            return [dict(row) for row in rows]
        finally:
            connection.close()


def _lenient_text(raw: bytes) -> str:
    """Damaged text stays readable, so that it costs its row and not the store."""
    return raw.decode("utf-8", errors="replace")


def _require_known_schema(connection: sqlite3.Connection, path: Path) -> None:
    version = str(connection.execute("SELECT max(version_num) FROM blocktune_schema").fetchone()[0])
    if not version.isdigit() or int(version) > NEWEST_SCHEMA:
        raise SchemaTooNewError(
            f"This blocktune reads stores up to schema {NEWEST_SCHEMA}, but {path} has schema {version:.20}. "
            "Update blocktune, or give another store by BLOCKTUNE_DB."
        )


def _explained(error: sqlite3.Error, path: Path) -> StoreError:
    """SQLite's error in the words of the house."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreLockedError(
            f"The store must answer within {1000 * READ_SECONDS:.0f} ms, but another process holds the lock of {path}. "
            "Configs it holds are not used until `Dispatcher.reload()`."
        )
    if name.startswith("SQLITE_INTERRUPT"):
        return StoreLockedError(
            f"The store must be read within {1000 * READ_SECONDS:.0f} ms, but {path} took longer. "
            "Put it on a local disk, or call `Dispatcher.reload()`."
        )
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return _corrupt(error, path)
    if name == "SQLITE_ERROR":
        return ForeignStoreError(
            f"The store must be a database of blocktune, but {path} is not ({error}). "
            "Give another one by BLOCKTUNE_DB; `tune run` fills it."
        )
    return StoreError(f"The store must be readable, but {path} is not ({name}: {error}). See `tune doctor`.")


def _corrupt(error: Exception, path: Path) -> StoreCorruptError:
    return StoreCorruptError(
        f"A SQLite database is required, but {path} is damaged or none ({error}). See `tune doctor`."
    )
