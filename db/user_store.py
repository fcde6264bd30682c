"""What was measured of users' kernels, in the same database as ours."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from blocktune.db.records.filling import fill_checksums
from blocktune.db.records.reading import id_of, readable_records
from blocktune.db.records.records import Environment
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.records.user_rows import UserRowWriter, user_best_of, user_trial_of
from blocktune.db.tables.engine import StoreEngines, open_engines
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.models import DeviceRow, EnvironmentRow
from blocktune.db.tables.schema import make_current, require_current, require_same
from blocktune.db.tables.server import kept_up
from blocktune.db.tables.sqlite_file import LOCK_TIMEOUT_SECONDS
from blocktune.db.tables.store_errors import translated
from blocktune.db.tables.user_models import UserBestRow, UserTrialRow
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.config import Problem

Record = TypeVar("Record", UserTrial, UserBest)


class UserKernelStore:
    """Trials and winners of tuned functions; open one with `UserKernelStore.open`. It keeps the promises of
    `ResultStore` and raises the same errors."""

    def __init__(self, engines: StoreEngines) -> None:
        self._engines = engines

    @classmethod
    def open(cls, target: str | Path | None = None, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Self:
        """Return the store at a path or URL; without one, at BLOCKTUNE_DB, else in the user's data directory. It is
        created or upgraded if need be.

        Raises:
            UsageError: a URL that cannot be parsed or whose driver is missing.
            StoreError: the database belongs to another program, is newer, locked, damaged or out of reach.
        """
        engines = open_engines(StoreTarget.of(target), read_only=False, lock_timeout_seconds=lock_timeout_seconds)
        make_current(engines, fill_checksums)
        return cls(engines)

    @classmethod
    def open_to_read(cls, target: str | Path | None = None) -> Self:
        """Return a store of the present schema, only to be read: it needs no write permission. Raises the errors of
        `open`."""
        engines = open_engines(StoreTarget.of(target), read_only=True, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS)
        require_current(engines)
        return cls(engines)

    def record(self, trial: UserTrial) -> None:
        """Store one trial; a later one of the same candidate and software replaces it.

        Raises:
            UsageError: a value is out of range, or there is a time without the outcome `ok` or the other way round.
        """
        self._write(lambda writer: writer.put_user_trial(trial))

    def set_best(self, best: UserBest) -> None:
        """Store the winner of a problem on a device, in place of an earlier one: it was measured against that one.

        Raises:
            UsageError: a value is out of range.
        """
        self._write(lambda writer: writer.put_user_best(best))

    def restore(self, trials: Iterable[UserTrial], bests: Iterable[UserBest]) -> None:
        """Store many trials and winners in one transaction: all of them or, when one breaks a rule, none.

        Raises:
            UsageError: one does.
        """
        kept_trials, kept_bests = tuple(trials), tuple(bests)

        def put_all(writer: UserRowWriter) -> None:
            for trial in kept_trials:
                writer.put_user_trial(trial)
            for best in kept_bests:
                writer.put_user_best(best)

        self._write(put_all)

    def trials(
        self, device: DeviceSpec, kernel: str, source_hash: str, problem: Problem, environment: Environment
    ) -> list[UserTrial]:
        """Return what was tried of one problem with this very source, device and software, oldest first."""
        key = {"kernel": kernel, "source_hash": source_hash, "problem": problem.document}
        query = select(UserTrialRow).filter_by(**key).order_by(UserTrialRow.created_at, UserTrialRow.id)
        query = query.where(UserTrialRow.device_id == id_of(DeviceRow, key=device.key))
        query = query.where(UserTrialRow.environment_id == id_of(EnvironmentRow, digest=environment.digest))
        return self._read(query, lambda row: user_trial_of(row, device))

    def best(self, device: DeviceSpec, kernel: str, source_hash: str, problem: Problem) -> UserBest | None:
        """Return the winner of exactly this problem on this device, measured with this source."""
        key = {"kernel": kernel, "source_hash": source_hash, "problem": problem.document}
        query = select(UserBestRow).filter_by(**key).where(UserBestRow.device_id == id_of(DeviceRow, key=device.key))
        found = self._read(query, lambda row: user_best_of(row, device))
        return next(iter(found), None)

    def bests(self, device: DeviceSpec | None = None) -> list[UserBest]:
        """Return all winners on this device, or on every one, by kernel, source and problem."""
        order = (UserBestRow.kernel, UserBestRow.source_hash, UserBestRow.problem)
        query = select(UserBestRow).order_by(*order)
        if device is not None:
            query = query.where(UserBestRow.device_id == id_of(DeviceRow, key=device.key))
        return self._read(query, lambda row: user_best_of(row, device))

    def close(self) -> None:
        """Let go of the database. Nothing waits to be written."""
        self._engines.reader.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, work: Callable[[UserRowWriter], None]) -> None:
        def transaction() -> None:
            with Session(self._engines.writer) as session, session.begin():
                require_same(session.connection(), self._engines.target)
                work(UserRowWriter(session))

        with translated(self._engines.target):
            kept_up(transaction, self._engines.lock_timeout_seconds)

    def _read(self, query: Select[Any], convert: Callable[[Any], Record]) -> list[Record]:
        def transaction() -> list[Record]:
            with Session(self._engines.reader) as session:
                return readable_records(session, query, convert, self._engines.target.label)

        with translated(self._engines.target):
            return kept_up(transaction, self._engines.lock_timeout_seconds)
