"""What was measured of people's own kernels, in the same database as ours."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from blocktune.db.records.bounds import SECONDS, TIME_US
from blocktune.db.records.records import Environment, Outcome
from blocktune.db.records.rows import RowWriter, environment_of, storable
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.tables.engine import LOCK_TIMEOUT_SECONDS, StoreEngines, open_engines, translated
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.models import EnvironmentRow
from blocktune.db.tables.schema import make_current
from blocktune.db.tables.user_models import UserBestRow, UserTrialRow
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.values.errors import StoreCorruptError, UsageError

Value = TypeVar("Value")


class UserKernelStore:
    """Trials and winners of tuned functions; open one with `UserKernelStore.open`. It keeps the promises of
    `ResultStore` and raises the same errors."""

    def __init__(self, engines: StoreEngines) -> None:
        self._engines = engines

    @classmethod
    def open(cls, target: str | Path | None = None, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Self:
        """The store at a path or URL; without one, at BLOCKTUNE_DB, else in the user's data directory. It is created or
        upgraded if need be.

        Raises:
            UsageError: a URL that cannot be parsed or whose driver is missing.
            StoreError: the database belongs to another program, is newer, locked, damaged or out of reach.
        """
        engines = open_engines(StoreTarget.of(target), read_only=False, lock_timeout_seconds=lock_timeout_seconds)
        make_current(engines)
        return cls(engines)

    def record(self, trial: UserTrial) -> None:
        """Stores one trial; a later one of the same candidate and software replaces it.

        Raises:
            UsageError: a number is out of range, or there is a time without the outcome `ok` or the other way round.
        """
        _require(TIME_US, time_us=trial.time_us)
        _require(SECONDS, seconds=trial.seconds)
        with self._write() as writer:
            writer.put_user_trial(trial)

    def set_best(self, best: UserBest) -> None:
        """Stores the winner of a problem on a device, in place of an earlier one: it was measured against that one.

        Raises:
            UsageError: a number is out of range.
        """
        _require(TIME_US, time_us=best.time_us, default_time_us=best.default_time_us)
        with self._write() as writer:
            writer.put_user_best(best)

    def trials(
        self, device: DeviceSpec, kernel: str, source_hash: str, problem: Problem, environment: Environment
    ) -> list[UserTrial]:
        """What was tried of one problem with this very source, device and software, oldest first."""
        key = {"kernel": kernel, "source_hash": source_hash, "problem": problem.document}
        query = select(UserTrialRow).filter_by(**key).order_by(UserTrialRow.created_at, UserTrialRow.id)
        matches = (UserTrialRow.device.has(key=device.key), UserTrialRow.environment.has(digest=environment.digest))
        return [_trial_of(row, device) for row in self._read(query.where(*matches))]

    def best(self, device: DeviceSpec, kernel: str, source_hash: str, problem: Problem) -> UserBest | None:
        """The winner of exactly this problem on this device, measured with this source."""
        key = {"kernel": kernel, "source_hash": source_hash, "problem": problem.document}
        found = self._read(select(UserBestRow).filter_by(**key).where(UserBestRow.device.has(key=device.key)))
        return _best_of(found[0], device) if found else None

    def bests(self, device: DeviceSpec) -> list[UserBest]:
        """All winners on this device, by kernel, source and problem."""
        order = (UserBestRow.kernel, UserBestRow.source_hash, UserBestRow.problem)
        found = self._read(select(UserBestRow).where(UserBestRow.device.has(key=device.key)).order_by(*order))
        return [_best_of(row, device) for row in found]

    def close(self) -> None:
        """Lets go of the database. Nothing waits to be written."""
        self._engines.reader.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _write(self) -> Iterator["_UserRowWriter"]:
        with translated(self._engines.target), Session(self._engines.writer) as session, session.begin():
            yield _UserRowWriter(session)

    def _read(self, query: Any) -> list[Any]:
        with translated(self._engines.target), Session(self._engines.reader) as session:
            return list(session.scalars(query).all())


class _UserRowWriter(RowWriter):
    """Writes devices and environments as our own results do."""

    def put_user_trial(self, trial: UserTrial) -> None:
        columns = {
            "created_at": trial.created_at,
            "gpu_uuid": trial.device.uuid,
            "outcome": str(trial.outcome),
            "error": storable(trial.error),
            "time_us": trial.time_us,
            "relative_to_anchor": trial.relative_to_anchor,
            "samples_us": list(trial.samples_us),
            "seconds": trial.seconds,
        }
        key = self._key_of(trial) | {
            "environment_id": self._environment(trial.environment),
            "config": trial.config.document,
        }
        self._put(UserTrialRow, key, columns)

    def put_user_best(self, best: UserBest) -> None:
        columns = {
            "environment_id": self._environment(best.environment),
            "config": best.config.document,
            "default_config": best.default.document,
            "created_at": best.created_at,
            "gpu_uuid": best.device.uuid,
            "time_us": best.time_us,
            "default_time_us": best.default_time_us,
            "speedup_over_default": best.speedup_over_default,
            "speedup_low": best.speedup_low,
            "speedup_high": best.speedup_high,
            "trials": best.trials,
        }
        self._put(UserBestRow, self._key_of(best), columns)

    def _key_of(self, record: UserTrial | UserBest) -> dict[str, Any]:
        return {
            "device_id": self._device(record.device),
            "kernel": record.config.kernel,
            "source_hash": record.source_hash,
            "problem": record.problem.document,
        }

    def _put(self, row_type: type[UserTrialRow | UserBestRow], key: dict[str, Any], columns: dict[str, Any]) -> None:
        row = self._session.scalar(select(row_type).filter_by(**key))
        if row is None:
            self._session.add(row_type(**key, **columns))
            return
        for name, value in columns.items():
            setattr(row, name, value)


def _require(bounds: tuple[float, float], **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not bounds[0] <= value <= bounds[1]:
            raise UsageError(f"`{name}` is from {bounds[0]:g} to {bounds[1]:g}, but got {value!r}. Correct the value.")


def _trial_of(row: UserTrialRow, device: DeviceSpec) -> UserTrial:
    return UserTrial(
        device=device,
        environment=_environment_of(row.environment),
        problem=_checked(Problem.from_document, row.problem),
        config=_config_of(row.kernel, row.config),
        source_hash=row.source_hash,
        outcome=_checked(Outcome, row.outcome),
        time_us=row.time_us,
        relative_to_anchor=row.relative_to_anchor,
        samples_us=tuple(row.samples_us),
        error=row.error,
        seconds=row.seconds,
        created_at=row.created_at,
    )


def _best_of(row: UserBestRow, device: DeviceSpec) -> UserBest:
    return UserBest(
        device=device,
        environment=_environment_of(row.environment),
        problem=_checked(Problem.from_document, row.problem),
        config=_config_of(row.kernel, row.config),
        source_hash=row.source_hash,
        time_us=row.time_us,
        default=_config_of(row.kernel, row.default_config),
        default_time_us=row.default_time_us,
        speedup_over_default=row.speedup_over_default,
        speedup_low=row.speedup_low,
        speedup_high=row.speedup_high,
        trials=row.trials,
        created_at=row.created_at,
    )


def _environment_of(row: EnvironmentRow) -> Environment:
    return _checked(lambda regime: environment_of(row), row.regime)  # all else may be any text


def _config_of(kernel: str, document: str) -> UserConfig:
    def parse(text: str) -> UserConfig:
        return UserConfig.from_json({"kernel": kernel, "parameters": json.loads(text)})

    return _checked(parse, document)


def _checked(parse: Callable[[str], Value], value: str) -> Value:
    """What the constructor of another room makes of a stored text.

    Raises:
        StoreCorruptError: it refuses.
    """
    try:
        return parse(value)
    except (ValueError, TypeError) as error:
        raise StoreCorruptError(
            f"Stored rows must hold values that blocktune wrote, but {value!r:.100} is none: {error} "
            "Move the database away and tune again."
        ) from error
