"""Connections to a SQLite file that anyone may have written, and how such a file can be opened for reading."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.values.errors import StoreError
from blocktune.runtime.store_reader.fork_gate import GatedConnection

LOCK_TIMEOUT_SECONDS = 30.0
"""How long a writer waits for another one before it gives up."""

CONNECTION_PRAGMAS = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA synchronous = NORMAL",  # with WAL: a killed process loses nothing, a power cut may lose the last commits
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
)

MAX_VALUE_BYTES = 16 << 20
"""Of a value, stored or made by what the file's schema says. The longest text of ours takes a quarter of it."""

STEPS_BETWEEN_CHECKS = 300_000
"""Some milliseconds of SQLite's work; then Python may notice Ctrl-C."""


def connect_sqlite(uri: str, lock_timeout_seconds: float) -> sqlite3.Connection:
    """Return a connection in autocommit mode: transactions begin where this module says so, not where the driver
    guesses.

    `timeout` sets SQLite's busy handler before anything else runs, since even a PRAGMA can meet a lock. `mmap_size`
    stays 0: mapped files turn damage into crashes.
    """
    connection = sqlite3.connect(
        uri, uri=True, timeout=lock_timeout_seconds, isolation_level=None, factory=GatedConnection
    )
    connection.text_factory = _text
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.set_progress_handler(_continue_statement, STEPS_BETWEEN_CHECKS)
    try:
        for pragma in CONNECTION_PRAGMAS:
            connection.execute(pragma)
    except BaseException:
        connection.close()
        raise
    return connection


def _text(raw: bytes) -> str:
    """Return a stored text. A byte outside UTF-8 becomes a sign that no rule lets pass: it costs its row alone."""
    return raw.decode("utf-8", "surrogateescape")


def _continue_statement() -> bool:
    """Let SQLite work on. Python handles its signals when it comes here: Ctrl-C ends the statement."""
    return False


def log_of(path: Path) -> Path:
    """Return the write-ahead log of a file. SQLite keeps it next to the file itself, not next to a link to the file."""
    return Path(f"{os.path.realpath(path)}-wal")


def require_file(path: Path) -> None:
    """Check that there is a file or nothing at all: to open a pipe would wait for ever.

    Raises:
        StoreError: there is something else, or it cannot be said.
    """
    with translate_errors(StoreTarget(path=path)):
        made_up = os.path.realpath(path).startswith(("/proc/", "/sys/"))  # a kernel's files may block as a pipe does
        if made_up or (path.exists() and not path.is_file()):
            state = "a directory" if path.is_dir() else "not a file"
            raise StoreError(f"The database {path} is {state}. Name a file by --db or BLOCKTUNE_DB.")


def readable_uri(path: Path, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> str:
    """Return how this file can be opened for reading.

    In a directory that cannot be written and on a full disk, SQLite cannot open a WAL database with `mode=ro`.
    `immutable=1` can, but would silently pass over rows that wait in a `-wal` file, so it is taken only where there are
    none.

    Raises:
        StoreError: there is no file, or rows wait in a `-wal` file that cannot be read here.
    """
    require_file(path)
    if not path.exists():
        raise StoreError(f"No such database: {path}. `tune run` creates it.")
    uri = f"{path.as_uri()}?mode=ro"
    with translate_errors(StoreTarget(path=path)):
        try:
            with closing(connect_sqlite(uri, lock_timeout_seconds)) as probe:
                probe.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR_SHM")):
                raise
            if log_of(path).exists() and log_of(path).stat().st_size:
                raise _unread_rows(path, error) from error
            return f"{uri}&immutable=1"
    return uri


def _unread_rows(path: Path, error: sqlite3.OperationalError) -> StoreError:
    wal = log_of(path).name
    if error.sqlite_errorname.startswith("SQLITE_IOERR_SHM"):
        return StoreError(
            f"{path} cannot be read while rows wait in {wal}, since its directory lacks the 32 KB of free space that "
            "this takes. Make room and try again."
        )
    return StoreError(
        f"{path} cannot be read while rows wait in {wal}, since its directory is not writable. Open the database "
        "once where it can be written, or copy both files to such a place."
    )
