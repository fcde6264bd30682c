"""The store as production reads it: one SQLite file, read-only, by the standard library.

The database room owns the tables; it keeps a view `dispatch` for this reader, with one row for each best. A store that
does not answer within `READ_SECONDS` is a problem to report. No call waits for that: see background.py.
"""

import logging
import os
import re
import sqlite3
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from blocktune.kernels.files.ownership import require_trusted
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import (
    ForeignStoreError,
    SchemaTooNewError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
)
from blocktune.runtime.store_reader.fork_gate import GatedConnection, gate
from blocktune.runtime.store_reader.store_views import DISPATCH, Row, Selection, StoreView, columns_of, unchanged_rows

logger = logging.getLogger("blocktune")

NEWEST_SCHEMA = 9
"""The newest schema version whose `dispatch` view is known to mean what this reader takes it for."""

_VERSION = re.compile("[0-9]{1,9}")

READ_SECONDS = 10.0
"""For all of the reading. That of `MAX_ROWS` winners takes a tenth of it."""

BUSY_SECONDS = 0.02
"""For a lock that another process holds; then the connection is closed, so that a fork need not wait for it."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.005, 0.2
"""Between two tries."""

_NEEDS_NO_LOCK = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR_SHM")
"""A directory that cannot be written, or a full disk, on which SQLite cannot keep its locks."""

_PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_INTERRUPT")

MAX_ROWS = 20_000
"""Winners that a process takes, as many as an import may bring."""

_STEPS_BETWEEN_CHECKS = 300_000  # some milliseconds; every check has to wait for its turn among Python's threads

_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 20,  # of a value, made or stored
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 16,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
"""What a file may cost us, whatever its schema says."""


@dataclass(frozen=True, slots=True)
class SqliteRows:
    """The rows of a store's view."""

    path: Path
    view: StoreView = DISPATCH

    def read(self, device: DeviceSpec, **values: str) -> list[Row]:
        """Return the rows of all devices of this one's compute capability, its own first, that have these values.

        Of more than `MAX_ROWS` the first ones are returned, with a warning.

        Raises:
            StoreError: the file is missing, locked, damaged, foreign or slow; the message says which and what to do.
        """
        try:
            self._require_file()
            require_trusted(self.path)
            rows, changed = unchanged_rows(self._read_in_time(Selection(self.view, device, values)))
        except OSError as error:  # a directory that may not be searched, a name that is too long
            raise StoreError(
                f"The store {self.path} cannot be read: {error.strerror}. Give yourself read permission, or name "
                "another one by BLOCKTUNE_DB."
            ) from error
        except sqlite3.Error as error:
            raise _explain_error(error, self.path) from error
        except ValueError as error:  # what SQLite hands over is no text, or no JSON
            raise _corrupt(error, self.path) from error
        if changed:
            logger.warning("%d row(s) of %s are ignored. The first: %s", len(changed), self.path, changed[0])
        return rows

    def _require_file(self) -> None:
        """Check that there is a file that can be read at once.

        Raises:
            StoreError: there is none. A pipe or a device would block the open; the files that a kernel makes up have no
                size. To look inside would cost the locks that this process holds on the file.
        """
        try:
            state = self.path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._missing("missing") from error
        if not stat.S_ISREG(state.st_mode):
            raise self._missing("not a file")
        if not state.st_size:
            raise ForeignStoreError(
                f"{self.path} is empty, and not a database of blocktune. Give another one by BLOCKTUNE_DB; `tune run` "
                "fills it."
            )

    def _missing(self, state: str) -> StoreError:
        return StoreError(
            f"The store {self.path} is {state}. `tune run` creates it; until then untuned configs are used."
        )

    def _read_in_time(self, selection: Selection) -> list[Row]:
        """Read again and again while another process holds the lock, or a fork of this one waits for the connection."""
        deadline, pause = time.monotonic() + READ_SECONDS, FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._read_either_way(selection, deadline)
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith(_PASSING) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _read_either_way(self, selection: Selection, deadline: float) -> list[Row]:
        """Read with locks first. A write-ahead store on read-only media or a full disk cannot take them; `immutable`
        reads it without, which is right only while no rows wait in the log."""
        try:
            return self._query(selection, "mode=ro", deadline)
        except sqlite3.OperationalError as error:
            unlockable = error.sqlite_errorname.startswith(_NEEDS_NO_LOCK)
            if not unlockable or self._rows_in_log():
                raise
            return self._query(selection, "mode=ro&immutable=1", deadline)

    def _rows_in_log(self) -> bool:
        log = Path(f"{os.path.realpath(self.path)}-wal")  # SQLite keeps it next to the file, not next to a link
        return log.exists() and log.stat().st_size > 0

    def _query(self, selection: Selection, options: str, deadline: float) -> list[Row]:
        uri = f"{self.path.absolute().as_uri()}?{options}"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, factory=GatedConnection)
        try:
            for limit, most in _LIMITS.items():
                connection.setlimit(limit, most)
            connection.text_factory = _lenient_text
            connection.set_progress_handler(
                lambda: gate.is_closed or time.monotonic() > deadline, _STEPS_BETWEEN_CHECKS
            )
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            connection.execute("BEGIN")  # so that columns, rows and their number belong together
            _require_known_schema(connection, self.path)
            columns = columns_of(connection, self.view, str(self.path))
            rows = list(selection.fetch_rows(connection, columns, MAX_ROWS + 1))
            if len(rows) > MAX_ROWS:
                self._warn_of_more(selection.count(connection), selection.device)
            return rows[:MAX_ROWS]
        finally:
            connection.close()

    def _warn_of_more(self, count: int, device: DeviceSpec) -> None:
        logger.warning(
            "%s holds %d winners for devices of compute capability %s, but a process takes up to %d: the others are "
            "not used, those of %s last of all. Freeze what this device needs with `tune freeze`, and name that file.",
            self.path,
            count,
            device.limits.name,
            MAX_ROWS,
            device.name,
        )


def _lenient_text(raw: bytes) -> str:
    """Decode a text. A damaged one stays readable, so that it costs its row and not the store."""
    return raw.decode("utf-8", errors="replace")


def _require_known_schema(connection: sqlite3.Connection, path: Path) -> None:
    version = str(connection.execute("SELECT max(version_num) FROM blocktune_schema").fetchone()[0])
    if not _VERSION.fullmatch(version) or int(version) > NEWEST_SCHEMA:
        raise SchemaTooNewError(
            f"This blocktune reads stores up to schema {NEWEST_SCHEMA}, but {path} has schema {version!r:.20}. "
            "Update blocktune, or give another store by BLOCKTUNE_DB."
        )


def _explain_error(error: sqlite3.Error, path: Path) -> StoreError:
    """Return SQLite's error in the words of the house."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreLockedError(
            f"Another process has held the lock of {path} for more than {READ_SECONDS:g} s. The configs in it are not "
            "used until `Dispatcher.reload()`."
        )
    if name.startswith("SQLITE_INTERRUPT"):
        return StoreLockedError(
            f"Reading {path} took more than {READ_SECONDS:g} s. Put it on a local disk, or call `Dispatcher.reload()`."
        )
    if name.startswith("SQLITE_TOOBIG"):
        return StoreCorruptError(
            f"{path} makes or holds a value larger than {_LIMITS[sqlite3.SQLITE_LIMIT_LENGTH] >> 20} MiB, which no "
            "store does. See `tune doctor`."
        )
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return _corrupt(error, path)
    if name == "SQLITE_ERROR":
        return ForeignStoreError(
            f"{path} is not a database of blocktune ({error}). Give another one by BLOCKTUNE_DB; `tune run` fills it."
        )
    return StoreError(f"The store {path} cannot be read ({name}: {error}). See `tune doctor`.")


def _corrupt(error: Exception, path: Path) -> StoreCorruptError:
    return StoreCorruptError(f"{path} is damaged or is not a SQLite database ({error}). See `tune doctor`.")
