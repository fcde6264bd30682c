"""The schema of the store: is it there, is it ours, is it current; and how it becomes so.

The version is a number in a table of our own, so that another program that uses Alembic on the same server is never
mistaken for us. SQLite files carry an application id too.
"""

import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, inspect, text

from blocktune.db.tables.backups import back_up
from blocktune.db.tables.engine import StoreEngines
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.models import Base
from blocktune.db.tables.sqlite_file import connect_sqlite, require_file
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.values.errors import (
    ForeignStoreError,
    SchemaTooNewError,
    StoreCorruptError,
    StoreError,
    UsageError,
)
from blocktune.runtime.store_reader.places import default_store_path

T = TypeVar("T")

CURRENT = "0009"
"""The newest revision in `migrations/versions`."""

VERSION_TABLE = "blocktune_schema"
_UNCHECKED = tuple(text(f"SELECT 1 FROM {table} WHERE checksum IS NULL LIMIT 1") for table in ("trial", "best"))
"""Queries of the index `unchecked_index`, so that every opening can ask."""
APPLICATION_ID = 0x626C6B74  # "blkt"


def require_current(engines: StoreEngines) -> None:
    """Check that the store can be read as it is.

    Raises:
        StoreError: it has no tables yet, or those of an older blocktune; or one of the errors of `version_of`.
    """
    version = _version(engines)
    if version != CURRENT:
        state = "holds no tables yet" if version is None else f"has schema {version}"
        raise StoreError(
            f"A store that is only read must have schema {CURRENT}, but {engines.target.label} {state}. "
            "Open it once for writing, for example by `tune list`."
        )


def is_current(engines: StoreEngines) -> bool:
    """Return whether the store can be read as it is; raises the errors of `version_of`."""
    return _version(engines) == CURRENT


def _version(engines: StoreEngines) -> str | None:
    return _read(engines, lambda connection: version_of(connection, engines.target))


def _version_and_late_rows(engines: StoreEngines) -> tuple[str | None, bool]:
    """Return the revision of the store, and whether a current one has rows without a checksum."""

    def state(connection: Connection) -> tuple[str | None, bool]:
        version = version_of(connection, engines.target)
        return version, version == CURRENT and any(connection.execute(query).first() for query in _UNCHECKED)

    return _read(engines, state)


def _read(engines: StoreEngines, query: Callable[[Connection], T]) -> T:
    """Return what a query finds by a connection of its own."""

    def transaction() -> T:
        with engines.reader.connect() as connection:
            return query(connection)

    with translate_errors(engines.target):
        return engines.retry_transaction(transaction)


def require_same(connection: Connection, target: StoreTarget) -> None:
    """Check, in a writer's transaction, that the schema is still the one for which the rows are made.

    Raises:
        SchemaTooNewError: a newer blocktune has upgraded the store since this process opened it.
        StoreError: the store was replaced by an older one.
    """
    version = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()
    if version == CURRENT:
        return
    newer = str(version) > CURRENT
    raise (SchemaTooNewError if newer else StoreError)(
        f"This process writes schema {CURRENT}, but {target.label} has schema {shown(str(version), 20)} by now. "
        + ("Update blocktune (`pip install --upgrade blocktune`) and start again." if newer else "Start again.")
    )


def make_current(
    engines: StoreEngines, upgrade: Callable[[Connection], None], fill: Callable[[Connection], None]
) -> None:
    """Create or upgrade the schema where it is not current. Any number of processes may do so at once.

    Args:
        engines: of the store.
        upgrade: gives rows of an older schema what the present one adds, in the same transaction.
        fill: gives rows their checksums that a process of an older version has added since, which was open before.

    Raises:
        StoreError: the place cannot be written; or one of the errors of `version_of`.
    """
    if engines.target.path is not None:
        _create_file(engines.target.path)
    version, has_late_rows = _version_and_late_rows(engines)
    if has_late_rows:
        _fill_late_rows(engines, fill)
    if version == CURRENT:
        return
    with translate_errors(engines.target):
        if engines.target.path is not None:
            if version is None:
                _enter_wal_mode(engines.target.path, engines.lock_timeout_seconds)
            else:
                back_up(engines.target.path)

        def transaction() -> None:
            with engines.writer.execution_options(blocktune_upgrade=True).begin() as connection:
                # Whoever held the lock before may have done the work.
                found = version_of(connection, engines.target)
                if found != CURRENT:
                    _upgrade(connection)
                if found not in (None, CURRENT):
                    upgrade(connection)

        engines.retry_transaction(transaction)


def _fill_late_rows(engines: StoreEngines, fill: Callable[[Connection], None]) -> None:
    """Give rows without a checksum theirs."""

    def transaction() -> None:
        with engines.writer.begin() as connection:
            fill(connection)

    with translate_errors(engines.target):
        engines.retry_transaction(transaction)


def version_of(connection: Connection, target: StoreTarget) -> str | None:
    """Return the revision of the store, or None when it is blank.

    Raises:
        ForeignStoreError: it belongs to another program.
        StoreCorruptError: its version cannot be read.
        SchemaTooNewError: a newer blocktune wrote it.
    """
    sqlite = connection.dialect.name == "sqlite"
    tables = set(inspect(connection).get_table_names())
    application = connection.exec_driver_sql("PRAGMA application_id").scalar_one() if sqlite else 0
    if VERSION_TABLE not in tables or application not in (0, APPLICATION_ID):
        # A server's database may be shared with others as long as no table has one of our names.
        strangers = tables if sqlite else tables & set(Base.metadata.tables)
        if strangers or application:
            raise ForeignStoreError(
                f"{target.label} belongs to another program, and not to blocktune: it has "
                f"{shown(', '.join(sorted(strangers)[:5]), 300) or f'the application id {application:#x}'}. Give "
                "another database by --db or BLOCKTUNE_DB."
            )
        return None
    if sqlite:
        _require_plain_tables(connection, target)
    versions = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    if len(versions) != 1 or not re.fullmatch("[0-9]{4}", str(versions[0])) or versions[0] == "0000":
        raise StoreCorruptError(
            f"`{VERSION_TABLE}` of {target.label} must hold one revision number, but holds {versions!r:.100}. Move "
            "the database away and import your exports into a new one."
        )
    if int(versions[0]) > int(CURRENT):
        raise SchemaTooNewError(
            f"This blocktune reads schemas up to {CURRENT}, but {target.label} has schema {versions[0]}. "
            "Update blocktune (`pip install --upgrade blocktune`), or give another database by --db or BLOCKTUNE_DB."
        )
    return str(versions[0])


def _require_plain_tables(connection: Connection, target: StoreTarget) -> None:
    """Check that reading and writing rows runs no code of whoever wrote the file: a view in place of a table may never
    end, and a trigger does what it likes.

    Raises:
        StoreCorruptError: one does.
    """
    ours = {*Base.metadata.tables, VERSION_TABLE}
    entries = connection.exec_driver_sql("SELECT type, lower(name), coalesce(sql, '') FROM sqlite_master").all()
    for kind, name, definition in entries:
        is_virtual = kind == "table" and definition.lstrip().upper().startswith("CREATE VIRTUAL")
        if kind == "trigger" or is_virtual or (kind != "table" and name in ours):
            what = "virtual table" if is_virtual else kind
            raise StoreCorruptError(
                f"{target.label} has the {what} {name!r:.80}, which blocktune never makes: a store consists of plain "
                "tables. `tune doctor --recover` saves what can be read; or give another one by --db or BLOCKTUNE_DB."
            )


def _create_file(path: Path) -> None:
    """Make an empty file, unless there is one: later connections never create any, so that a file that vanishes while
    in use is noticed."""
    require_file(path)
    try:
        if _is_users_own(path):  # a folder that was named may be misspelt, so only the user's own is made
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch()
    except FileNotFoundError as error:
        raise StoreError(
            f"No such folder: {path.parent}. Make it, or give another place by --db or BLOCKTUNE_DB."
        ) from error
    except OSError as error:
        if path.exists():
            return  # not ours to touch, but perhaps to read
        raise StoreError(
            f"The directory of the database, {path.parent}, is not writable: {error.strerror}. Give another place by "
            "--db or BLOCKTUNE_DB."
        ) from error


def _is_users_own(path: Path) -> bool:
    try:
        return path == Path(os.path.realpath(default_store_path()))
    except UsageError:  # this user has no home
        return False


def _enter_wal_mode(path: Path, timeout_seconds: float) -> None:
    """Set the journal mode, which the file keeps: readers and one writer do not wait for each other.

    SQLite answers `locked` at once here, whatever the busy timeout, when two processes try it together. A file system
    that cannot do it leaves the file in its old mode, which is slower and as safe.
    """
    deadline = time.monotonic() + timeout_seconds
    with closing(connect_sqlite(f"{path.as_uri()}?mode=rw", timeout_seconds)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def _upgrade(connection: Connection) -> None:
    """Run the missing migrations in the connection's transaction. Imports alembic, which takes most of a second."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "blocktune.db:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, CURRENT)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
