"""The engines of a store: how its connections are opened, and how its transactions begin.

No connection outlives a call (`NullPool`), so nothing of SQLite's is ever carried across a fork or shared by threads.
Writers run one at a time, in SQLite by `BEGIN IMMEDIATE` and in PostgreSQL by one advisory lock: what a writer has
looked up cannot change before it writes.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.server import WATCHED_DRIVER, retry_transaction, server_engine
from blocktune.db.tables.sqlite_file import connect_sqlite, readable_uri
from blocktune.db.tables.waiting import slow_answer_warning

T = TypeVar("T")

WRITER_LOCK = 0x626C6B74756E65  # "blktune", the key of the advisory lock that stands for BEGIN IMMEDIATE

PAUSE_SECONDS = 300
"""How long a client of a server may do something else within a transaction. One that was stopped, or whose machine has
died, would keep all others waiting until the server misses it, for hours."""

LOCK_TURN_MILLISECONDS = 200
"""How long SQLite waits for a lock before Python sees to its signals."""


@dataclass(frozen=True, slots=True)
class StoreEngines:
    """The two ways into one store. `reader` sees a snapshot and takes no lock; `writer` is alone while it writes."""

    target: StoreTarget
    reader: Engine
    writer: Engine
    lock_timeout_seconds: float

    def retry_transaction(self, work: Callable[[], T]) -> T:
        """Return what a transaction returns, which is begun again where a server drops it."""
        if self.target.path is not None:
            return work()
        with self.slow_answer_warning():
            return retry_transaction(work, self.lock_timeout_seconds)

    def slow_answer_warning(self) -> AbstractContextManager[None]:
        """Return a context with a warning of a long wait for a server."""
        if self.target.path is not None:
            return nullcontext()
        return slow_answer_warning(self.target.label, self.lock_timeout_seconds)


def open_engines(target: StoreTarget, *, read_only: bool, lock_timeout_seconds: float) -> StoreEngines:
    """Return engines for the target; connect only to find out how a read-only SQLite file can be opened.

    Raises:
        UsageError: the URL names a dialect or driver that is not installed.
        StoreError: the file is missing or cannot be read.
    """
    if target.path is not None:
        uri = readable_uri(target.path, lock_timeout_seconds) if read_only else f"{target.path.as_uri()}?mode=rw"
        connect = partial(connect_sqlite, uri, lock_timeout_seconds)
        engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
        event.listen(engine, "begin", partial(_begin_sqlite, lock_timeout_seconds))
    else:
        assert target.url is not None
        engine = server_engine(target.url, lock_timeout_seconds, read_only=read_only)
        event.listen(engine, "begin", partial(_begin_server, lock_timeout_seconds))
    return StoreEngines(target, engine, engine.execution_options(blocktune_writer=True), lock_timeout_seconds)


def _is_writer(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("blocktune_writer"))


def _begin_sqlite(lock_timeout_seconds: float, connection: Connection) -> None:
    """Begin a transaction. A deferred BEGIN that turns into a write fails at once when another writer was faster; no
    timeout helps it.

    Who waits for the lock comes back to Python at every turn, so that Ctrl-C ends the waiting.
    """
    if not _is_writer(connection):
        connection.exec_driver_sql("BEGIN")
        return
    if connection.get_execution_options().get("blocktune_upgrade"):
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")  # a table that others refer to may be made again
    deadline = time.monotonic() + lock_timeout_seconds
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {LOCK_TURN_MILLISECONDS}")
    while True:
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            break
        except OperationalError as error:
            busy = getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_BUSY")
            if not busy or time.monotonic() > deadline:
                raise
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(lock_timeout_seconds * 1000)}")


def _begin_server(lock_timeout_seconds: float, connection: Connection) -> None:
    """Give a transaction its settings, whatever those of the role are, and remember which process of the server works
    for it. A writer waits for the others.

    Tables are joined in the order of the query: a record refers to up to seven rows, each by its primary key, and to
    look for a better order takes longer than to find them.
    """
    if connection.dialect.name != "postgresql":
        return
    settings = {
        "join_collapse_limit": 1,
        "lock_timeout": round(lock_timeout_seconds * 1000),
        "idle_in_transaction_session_timeout": PAUSE_SECONDS * 1000,
        "datestyle": "ISO",  # the only one that drivers read
    }
    values = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items())
    backend_pid, *_ = connection.execute(text(f"SELECT pg_backend_pid(), {values}")).one()
    if connection.dialect.driver == WATCHED_DRIVER:
        connection.connection.driver_connection.backend_pid = backend_pid  # type: ignore[union-attr]
    if _is_writer(connection):
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITER_LOCK})
