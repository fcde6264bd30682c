"""The connection of a store to its database: open it, read and write in transactions, and close it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import Session

from blocktune.db.records.filling import fill_checksums, upgrade_checksums
from blocktune.db.records.reading import readable_records
from blocktune.db.tables.engine import StoreEngines, open_engines
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.schema import is_current, make_current, require_current, require_same
from blocktune.db.tables.sqlite_file import LOCK_TIMEOUT_SECONDS
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.values.errors import StoreError

Record = TypeVar("Record")
T = TypeVar("T")


class ConnectedStore:
    """A SQLite file or a PostgreSQL database that is open.

    Any number of processes and threads may use the same one. What a writing method stored is committed when it
    returns: a process that is killed afterwards loses nothing. Every method raises `StoreLockedError` when another
    writer keeps the lock for the whole timeout, `StoreCorruptError` when the file is damaged, and `StoreError` when the
    database does not answer.
    """

    def __init__(self, engines: StoreEngines, *, read_only: bool) -> None:
        self._engines = engines
        self._read_only = read_only

    @classmethod
    def open(
        cls,
        target: str | Path | StoreTarget | None = None,
        *,
        read_only: bool = False,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    ) -> Self:
        """Return the store at a path or URL; without one, at BLOCKTUNE_DB, else in the user's data directory.

        A missing database is created and an older one upgraded, unless it is only read.

        Raises:
            UsageError: a URL that cannot be parsed or whose driver is missing.
            ForeignStoreError: the database belongs to another program.
            SchemaTooNewError: a newer blocktune wrote it.
            StoreError: it is locked, damaged, out of reach or, to be only read, missing.
        """
        place = target if isinstance(target, StoreTarget) else StoreTarget.of(target)
        engines = open_engines(place, read_only=read_only, lock_timeout_seconds=lock_timeout_seconds)
        if read_only:
            require_current(engines)
        else:
            make_current(engines, upgrade_checksums, fill_checksums)
        return cls(engines, read_only=read_only)

    @classmethod
    def open_to_read(cls, target: str | Path | None = None) -> Self:
        """Return the store at a place as `open` takes it, only to be read. It needs no write permission, unless an
        older blocktune made the store: then it is upgraded first. Raises the errors of `open`."""
        place = StoreTarget.of(target)
        engines = open_engines(place, read_only=True, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS)
        if not is_current(engines):
            writable = open_engines(place, read_only=False, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS)
            make_current(writable, upgrade_checksums, fill_checksums)
        return cls(engines, read_only=True)

    @property
    def target(self) -> StoreTarget:
        """Where it is."""
        return self._engines.target

    @property
    def label(self) -> str:
        """The place as people may see it, without a password."""
        return self._engines.target.label

    def with_timeout(self, lock_timeout_seconds: float) -> Self:
        """Return the same store, whose writers wait for this long."""
        engines = open_engines(self.target, read_only=False, lock_timeout_seconds=lock_timeout_seconds)
        return type(self)(engines, read_only=False)

    def close(self) -> None:
        """Let go of the database. Nothing waits to be written."""
        self._engines.reader.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_writable(self) -> None:
        if self._read_only:
            raise StoreError(f"{self.label} was opened for reading alone, so nothing can be written to it.")

    def _writing(self, work: Callable[[Session], T]) -> T:
        """Return what a piece of work returns that is done in a transaction of its own, alone.

        Of one that had to be done again it is what the first returned that came to its commit: the answer may have been
        lost alone, and what was stored by then is not news to the second.
        """
        self._require_writable()
        returned: list[T] = []

        def transaction() -> None:
            with Session(self._engines.writer) as session, session.begin():
                require_same(session.connection(), self.target)
                returned.append(work(session))
                session.flush()

        with translate_errors(self._engines.target):
            self._engines.retry_transaction(transaction)
        return returned[0]

    def _reading(self, work: Callable[[Session], T]) -> T:
        """Return what a piece of work returns that reads in one transaction."""

        def transaction() -> T:
            with Session(self._engines.reader) as session:
                return work(session)

        with translate_errors(self._engines.target):
            return self._engines.retry_transaction(transaction)

    def _read(self, query: Select[Any], convert: Callable[[Any], Record]) -> list[Record]:
        """Return the records of a query that can be read."""
        return self._reading(lambda session: readable_records(session, query, convert, self.label))
