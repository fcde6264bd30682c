"""Connections to a database server, which may be restarted, silent or away."""

import math
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from blocktune.db.tables.waiting import BUSY, connect_seconds
from blocktune.kernels.values.errors import UsageError

SILENCE_SECONDS = 30
"""How long a connection that is in use may be silent before the operating system gives it up."""

LIBPQ_OPTIONS: dict[str, int | str] = {
    "keepalives_idle": SILENCE_SECONDS // 2,
    "keepalives_interval": SILENCE_SECONDS // 6,
    "keepalives_count": 3,
    "tcp_user_timeout": SILENCE_SECONDS * 1000,
}
"""What drivers over libpq are given where the URL does not say otherwise."""

LIBPQ_DRIVERS = ("psycopg", "psycopg2", "psycopg_async")
WATCHED_DRIVER = "psycopg"
"""Whose connections notice that the server does not answer: watched_connection.py."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 2.0
"""Between two tries to reach a server that was there before."""

BUSY_PAUSE_SECONDS = 0.25
"""At most, where the server is full: connections end all the time, and who asks rarely may never get one."""

REPEATED = ("40P01", "40001")
"""What a server tells who must begin again: a deadlock, as of a reader and an upgrade that lock tables in another
order, and a conflict of a standby's."""

T = TypeVar("T")


def server_engine(url: URL, patience_seconds: float, *, read_only: bool) -> Engine:
    """Return the engine of a server's database. A server that is full, or that is restarted after it was reached once,
    is waited for.

    Args:
        url: where it is. Of several hosts the first is taken that answers, and that takes what is written.
        patience_seconds: how long it is waited for.
        read_only: whether nothing is written, so that a standby will do.

    Raises:
        UsageError: the driver is not installed.
    """
    try:
        options = _options(url, patience_seconds, read_only=read_only)
        engine = create_engine(url, poolclass=NullPool, connect_args=options, **_isolation(url))
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UsageError(
            f"The driver {url.drivername!r} of the database URL is not installed: {error}. For PostgreSQL `pip "
            "install psycopg[binary]` and write `postgresql+psycopg://...`."
        ) from error
    event.listen(engine, "do_connect", _Connecting(patience_seconds).connect)
    return engine


def retry_transaction(work: Callable[[], T], patience_seconds: float) -> T:
    """Do a whole transaction, and again for a while where the server drops its connection or says so. So it must be one
    that may happen twice: the server may have committed just before.

    Args:
        work: begins and ends the transaction.
        patience_seconds: how long after the first failure it is begun again.
    """
    deadline, pause = math.inf, FIRST_PAUSE_SECONDS
    while True:
        try:
            return work()
        except DBAPIError as error:
            deadline = min(deadline, time.monotonic() + patience_seconds)
            is_repeated = error.connection_invalidated or getattr(error.orig, "sqlstate", None) in REPEATED
            if not is_repeated or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _isolation(url: URL) -> dict[str, Any]:
    """Return the isolation of transactions, whatever that of the role is: in any other a writer would not see what was
    stored while it waited for its lock, and tables that an upgrade has made again would be empty to a reader."""
    return {"isolation_level": "READ COMMITTED"} if url.get_backend_name() == "postgresql" else {}


def _options(url: URL, patience_seconds: float, *, read_only: bool) -> dict[str, int | str]:
    if url.get_driver_name() not in LIBPQ_DRIVERS:
        return {}
    options = LIBPQ_OPTIONS | {"connect_timeout": connect_seconds(patience_seconds)}
    options |= {} if read_only else {"target_session_attrs": "read-write"}
    return {name: value for name, value in options.items() if name not in url.query}


class _Connecting:
    """Connects: the first time at once or not at all, unless the server is only busy; later with patience."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._was_reached = False

    def connect(self, dialect: Any, _: Any, arguments: Any, options: Mapping[str, Any]) -> Any:
        """Return a connection of the driver; SQLAlchemy calls this."""
        connect = partial(dialect.connect, *arguments, **options)
        if dialect.driver == WATCHED_DRIVER:
            connect = partial(_watched_connection, self._patience_seconds, *arguments, **options)
        deadline, pause = time.monotonic() + self._patience_seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                connection = connect()
            except dialect.loaded_dbapi.OperationalError as error:
                is_busy = BUSY.search(str(error)) is not None
                if not (self._was_reached or is_busy) or time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause * random.uniform(0.5, 1.0))  # so that clients that came together part
                pause = min(2 * pause, BUSY_PAUSE_SECONDS if is_busy else MAX_PAUSE_SECONDS)
            else:
                self._was_reached = True
                return connection


def _watched_connection(patience_seconds: float, *arguments: Any, **options: Any) -> Any:
    """Return a connection of an optional driver."""
    from blocktune.db.tables.watched_connection import WatchedConnection

    return WatchedConnection.connect_patiently(patience_seconds, *arguments, **options)
