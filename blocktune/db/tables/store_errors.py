"""SQLAlchemy's and the drivers' errors as store errors, with the way out."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.values.errors import StoreCorruptError, StoreError, StoreLockedError, UsageError

MAX_REASON = 500
"""Characters of what a driver says."""


@contextmanager
def translate_errors(target: StoreTarget) -> Iterator[None]:
    """Turn the errors of SQLAlchemy and the driver into those of blocktune.

    Raises:
        StoreLockedError: another process held the lock for the whole timeout.
        StoreCorruptError: the file is no SQLite database, or a damaged one.
        UsageError: a value breaks a constraint of its table or does not fit its column.
        StoreError: anything else that the database refuses.
        KeyboardInterrupt: Ctrl-C ended a statement of SQLite.
    """
    try:
        yield
    except (IntegrityError, DataError) as error:
        raise UsageError(
            f"The database refuses the row (see db/tables/models.py): {_reason(error.orig)}. Correct the value."
        ) from error
    except DBAPIError as error:
        raise _store_error(target, error.orig or error) from error
    except sqlite3.Error as error:
        raise _store_error(target, error) from error
    except UnicodeDecodeError as error:  # SQLite's own message repeats a damaged name
        raise _corrupt(target, error) from error
    except UnicodeError as error:  # a host that no name can be
        raise StoreError(
            f"The database {target.label} does not work: {_reason(error)}. Correct the host of the URL."
        ) from error
    except OSError as error:  # a directory that may not be searched, a name that is too long
        raise StoreError(
            f"The database {target.label} cannot be read: {error.strerror}. Give another one by --db or BLOCKTUNE_DB."
        ) from error
    except OverflowError as error:
        raise UsageError(f"A number of the row does not fit its column: {error}. Correct the value.") from error


def _store_error(target: StoreTarget, error: BaseException) -> StoreError:
    """Return what this error of a driver means for the store, with the way out."""
    # an error has a name in SQLite and a code in PostgreSQL: 55P03 lock_not_available, 53100 disk_full
    name = getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None) or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "55P03")):
        return StoreLockedError(
            f"Another process kept {target.label} locked for the whole timeout, and only one can write at a time. "
            "Wait for it or end it, then try again; what was stored before is safe."
        )
    if name.startswith("SQLITE_INTERRUPT"):  # nothing else ends a statement: sqlite_file.py
        raise KeyboardInterrupt from error
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_TOOBIG")):
        return _corrupt(target, error)
    if name.startswith("SQLITE_READONLY"):
        return StoreError(
            f"{target.label} or its directory cannot be written to ({_reason(error)}). Get write permission, or "
            "name another place by --db or BLOCKTUNE_DB."
        )
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_SHM", "53100")):
        return StoreError(f"The disk of {target.label} is full. Make room and try again.")
    return StoreError(
        f"The database {target.label} does not work: {_reason(error)}. See `tune doctor`, or give another one by "
        "--db or BLOCKTUNE_DB."
    )


def _corrupt(target: StoreTarget, error: BaseException) -> StoreCorruptError:
    return StoreCorruptError(
        f"{target.label} is not a sound SQLite database ({_reason(error)}). `tune doctor --recover` saves what "
        "can be read; or give another one by --db or BLOCKTUNE_DB."
    )


def _reason(error: object) -> str:
    """Return what a driver says as one line without a full stop. It may repeat what a file holds."""
    return shown(" ".join(str(error).split()).rstrip("."), MAX_REASON)
