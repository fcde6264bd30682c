"""What was measured of users' kernels, in the same database as ours."""

from collections.abc import Callable, Iterable

from sqlalchemy import select

from blocktune.db.connected_store import ConnectedStore
from blocktune.db.records.reading import id_of
from blocktune.db.records.records import Environment
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.records.user_rows import UserRowWriter, user_best_of, user_trial_of
from blocktune.db.tables.models import DeviceRow, EnvironmentRow
from blocktune.db.tables.user_models import UserBestRow, UserTrialRow
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.config import Problem


class UserKernelStore(ConnectedStore):
    """Trials and winners of autotuned kernels; open one with `UserKernelStore.open`."""

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

    def _write(self, work: Callable[[UserRowWriter], None]) -> None:
        self._writing(lambda session: work(UserRowWriter(session)))
