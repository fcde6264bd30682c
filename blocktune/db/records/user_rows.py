"""Records of tuned functions to rows and back, as db/records/rows.py does it for our own kernels."""

from dataclasses import replace
from typing import Any

from blocktune.db.records.bounds import require_sound_user_best, require_sound_user_trial
from blocktune.db.records.records import Outcome
from blocktune.db.records.row_checksums import record_checksum, served_user_checksum
from blocktune.db.records.row_writer import RowWriter, storable
from blocktune.db.records.rows import device_of, environment_of, require_as_written, require_links
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.tables.user_models import UserBestRow, UserTrialRow
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.tuned.config import Problem, UserConfig
from blocktune.kernels.values.column_kinds import plain_values, record_values


class UserRowWriter(RowWriter):
    """Writes trials and winners of tuned functions; devices and environments as our own results do."""

    def put_user_trial(self, trial: UserTrial) -> None:
        """Store the trial in place of an earlier one of the same candidate and software.

        Raises:
            UsageError: a value is out of range, or there is a time without the outcome `ok` or the other way round.
        """
        trial = replace(trial, error=storable(trial.error))
        require_sound_user_trial(trial)
        columns = {
            "created_at": trial.created_at,
            "gpu_uuid": trial.device.uuid,
            "outcome": str(trial.outcome),
            **plain_values(trial),
            "checksum": record_checksum(trial),
        }
        key = self._key_of(trial) | {
            "environment_id": self._environment(trial.environment),
            "config": trial.config.document,
        }
        self._put(UserTrialRow, key, columns)

    def put_user_best(self, best: UserBest) -> None:
        """Store the winner of its problem and device in place of an earlier one.

        Raises:
            UsageError: a value is out of range.
        """
        require_sound_user_best(best)
        columns = {
            "environment_id": self._environment(best.environment),
            "config": best.config.document,
            "default_config": best.default.document,
            "created_at": best.created_at,
            "gpu_uuid": best.device.uuid,
            **plain_values(best),
            "checksum": record_checksum(best),
            "served_checksum": served_user_checksum(best),
        }
        self._put(UserBestRow, self._key_of(best), columns)

    def _key_of(self, record: UserTrial | UserBest) -> dict[str, Any]:
        return {
            "device_id": self._device(record.device),
            "kernel": record.config.kernel,
            "source_hash": record.source_hash,
            "problem": record.problem.document,
        }


def user_trial_of(row: UserTrialRow, device: DeviceSpec | None = None) -> UserTrial:
    """Return the record of this row, on the device as it is stored unless the caller knows it.

    Raises:
        one of UNREADABLE: a value is out of range. blocktune does not write such values.
    """
    trial = UserTrial(outcome=Outcome(row.outcome), **_shared(row, device), **record_values(UserTrial, row))
    require_sound_user_trial(trial)
    require_as_written(replace(trial, device=replace(trial.device, uuid=row.gpu_uuid)), row.checksum)
    return trial


def user_best_of(row: UserBestRow, device: DeviceSpec | None = None) -> UserBest:
    """Return the record of this row, on the device as it is stored unless the caller knows it.

    Raises:
        one of UNREADABLE: a value is out of range. blocktune does not write such values.
    """
    default = UserConfig.from_document(row.kernel, row.default_config)
    best = UserBest(default=default, **_shared(row, device), **record_values(UserBest, row))
    require_sound_user_best(best)
    require_as_written(replace(best, device=replace(best.device, uuid=row.gpu_uuid)), row.checksum)
    return best


def _shared(row: UserTrialRow | UserBestRow, device: DeviceSpec | None) -> dict[str, Any]:
    """Return the fields that a trial and a winner have in common."""
    require_links(row)
    return {
        "device": device or device_of(row.device, row.gpu_uuid),
        "environment": environment_of(row.environment),
        "problem": Problem.from_document(row.problem),
        "config": UserConfig.from_document(row.kernel, row.config),
        "source_hash": row.source_hash,
        "created_at": row.created_at,
    }
