"""Connections to the store: how it is opened, and what its errors mean.

No connection outlives a call (`NullPool`), so nothing of SQLite's is ever carried across a fork or shared by threads.
Writers run one at a time, in SQLite by `BEGIN IMMEDIATE` and in PostgreSQL by one advisory lock: what a writer has
looked up cannot change before it writes.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.stored.fork_gate import GatedConnection
from blocktune.kernels.values.errors import StoreCorruptError, StoreError, StoreLockedError, UsageError

LOCK_TIMEOUT_SECONDS = 30.0
"""How long a writer waits for another one before it gives up."""

WRITER_LOCK = 0x626C6B74756E65  # "blktune", the key of the advisory lock that stands for BEGIN IMMEDIATE

CONNECTION_PRAGMAS = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA synchronous = NORMAL",  # with WAL: a killed process loses nothing, a power cut may lose the last commits
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
)


@dataclass(frozen=True, slots=True)
class StoreEngines:
    """The two ways into one store. `reader` sees a snapshot and takes no lock; `writer` is alone while it writes."""

    target: StoreTarget
    reader: Engine
    writer: Engine
    lock_timeout_seconds: float


def open_engines(target: StoreTarget, *, read_only: bool, lock_timeout_seconds: float) -> StoreEngines:
    """Engines for the target; connects only to find out how a read-only SQLite file can be opened.

    Raises:
        UsageError: the URL names a dialect or driver that is not installed.
        StoreError: the file is missing or cannot be read.
    """
    if target.path is not None:
        uri = _readable_uri(target.path) if read_only else f"{target.path.as_uri()}?mode=rw"
        connect = partial(connect_sqlite, uri, lock_timeout_seconds)
        engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
        event.listen(engine, "begin", _begin_sqlite)
    else:
        assert target.url is not None
        engine = _server_engine(target.url)
        event.listen(engine, "begin", partial(_begin_server, lock_timeout_seconds))
    return StoreEngines(target, engine, engine.execution_options(blocktune_writer=True), lock_timeout_seconds)


def _server_engine(url: URL) -> Engine:
    try:
        return create_engine(url, poolclass=NullPool)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UsageError(
            f"A database URL must name an installed driver, but {url.drivername!r} is not: {error}. "
            "For PostgreSQL `pip install psycopg[binary]` and write `postgresql+psycopg://...`."
        ) from error


def connect_sqlite(uri: str, lock_timeout_seconds: float) -> sqlite3.Connection:
    """A connection in autocommit mode: transactions begin where this module says so, not where the driver guesses.

    `timeout` sets SQLite's busy handler before anything else runs, since even a PRAGMA can meet a lock. `mmap_size`
    stays 0: mapped files turn damage into crashes.
    """
    connection = sqlite3.connect(
        uri, uri=True, timeout=lock_timeout_seconds, isolation_level=None, factory=GatedConnection
    )
    connection.text_factory = bytes.decode  # raises UnicodeDecodeError, where the driver's own way names no code
    try:
        for pragma in CONNECTION_PRAGMAS:
            connection.execute(pragma)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_writer(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("blocktune_writer"))


def _begin_sqlite(connection: Connection) -> None:
    # A deferred BEGIN that turns into a write fails at once when another writer was faster; no timeout helps it.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _is_writer(connection) else "BEGIN")


def _begin_server(lock_timeout_seconds: float, connection: Connection) -> None:
    if _is_writer(connection) and connection.dialect.name == "postgresql":
        connection.execute(text(f"SET LOCAL lock_timeout = {round(lock_timeout_seconds * 1000)}"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITER_LOCK})


def _readable_uri(path: Path) -> str:
    """How this file can be opened for reading.

    In a directory that cannot be written, SQLite cannot open a WAL database with `mode=ro`. `immutable=1` can, but
    would silently pass over rows that wait in a `-wal` file, so it is taken only where there are none.

    Raises:
        StoreError: there is no file, or rows wait in a `-wal` file that cannot be read here.
    """
    if not path.exists():
        raise StoreError(f"The database must exist to be read, but there is no {path}. `tune run` creates it.")
    uri = f"{path.as_uri()}?mode=ro"
    with translated(StoreTarget(path=path)):
        try:
            with closing(connect_sqlite(uri, LOCK_TIMEOUT_SECONDS)) as probe:
                probe.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
                raise
            wal = path.with_name(path.name + "-wal")
            if wal.exists() and wal.stat().st_size:
                raise StoreError(
                    f"Reading {path} needs its directory to be writable while rows wait in {wal.name}, but it is not. "
                    "Open the database once where it can be written, or copy both files to such a place."
                ) from error
            return f"{uri}&immutable=1"
    return uri


@contextmanager
def translated(target: StoreTarget) -> Iterator[None]:
    """Turns the errors of SQLAlchemy and the driver into those of blocktune.

    Raises:
        StoreLockedError: another process held the lock for the whole timeout.
        StoreCorruptError: the file is no SQLite database, or a damaged one.
        UsageError: a value breaks a constraint of its table or does not fit its column.
        StoreError: anything else that the database refuses.
    """
    try:
        yield
    except (IntegrityError, DataError) as error:
        raise UsageError(
            f"A row must keep the constraints of its table (db/tables/models.py), but: {error.orig}. Correct the value."
        ) from error
    except DBAPIError as error:
        raise _store_error(target, error.orig or error) from error
    except sqlite3.Error as error:
        raise _store_error(target, error) from error
    except UnicodeDecodeError as error:  # SQLite's own message repeats a damaged name
        raise _corrupt(target, error) from error
    except OverflowError as error:
        raise UsageError(f"A row must hold numbers that fit their columns, but: {error}. Correct the value.") from error


def _store_error(target: StoreTarget, error: BaseException) -> StoreError:
    """What this error of a driver means for the store, with the way out."""
    # `database is locked` has a name in SQLite and a code in PostgreSQL (lock_not_available).
    name = getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None) or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "55P03")):
        return StoreLockedError(
            f"One process writes at a time, but another one kept {target.label} locked for the whole timeout. "
            "Wait for it or end it, then try again; what was stored before is safe."
        )
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return _corrupt(target, error)
    if name.startswith("SQLITE_READONLY"):
        return StoreError(
            f"Writing needs write permission on {target.label} and its directory, but there is none ({error}). "
            "Give another place by --db or BLOCKTUNE_DB."
        )
    if name.startswith("SQLITE_FULL"):
        return StoreError(
            f"Writing needs free space beside {target.label}, but the disk is full. Make room and try again."
        )
    return StoreError(
        f"The database {target.label} must be reachable and in order, but it answers: {error}. "
        "See `tune doctor`, or give another one by --db or BLOCKTUNE_DB."
    )


def _corrupt(target: StoreTarget, error: BaseException) -> StoreCorruptError:
    return StoreCorruptError(
        f"The store must be a sound SQLite database, but {target.label} is not ({error}). "
        "`tune doctor --recover` saves what can be read; or give another one by --db or BLOCKTUNE_DB."
    )
