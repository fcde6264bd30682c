"""Writes records as rows, in one transaction of the store's single writer: looking up and then adding cannot race."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from blocktune.db.records.bounds import require_sound_best, require_sound_trial
from blocktune.db.records.reading import readable_records
from blocktune.db.records.records import ORIGIN_RANK, AnyBest, AnyTrial, Environment, Record
from blocktune.db.records.row_checksums import device_checksum, record_checksum, served_checksum
from blocktune.db.records.row_values import (
    IMPORTED,
    UNREADABLE,
    config_columns,
    document_of,
    shape_columns,
    shape_documents,
)
from blocktune.db.records.rows import best_of
from blocktune.db.tables.columns import ERROR
from blocktune.db.tables.models import (
    Base,
    BestRow,
    ConfigRow,
    DeviceRow,
    EnvironmentRow,
    KernelRow,
    ShapeRow,
    TrialRow,
)
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.column_kinds import columns_of, plain_values
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig

R = TypeVar("R", DeviceRow, EnvironmentRow, KernelRow, ShapeRow, ConfigRow)
V = TypeVar("V", Environment, AttentionShape | KernelProblem, KernelConfig | LaunchConfig, DeviceSpec)


class RowWriter:
    """Writes records one by one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids: dict[tuple[type[Base], tuple[Any, ...]], int] = {}
        self._known: dict[object, int] = {}

    def put_trial(self, trial: AnyTrial) -> None:
        """Store the trial in place of an earlier one of the same candidate."""
        trial = sound_trial(trial)
        self._put(TrialRow, self._candidate(trial), trial_columns(trial))

    def put_best(self, best: AnyBest) -> bool:
        """Store the best of its place, as `_best_place` says, unless the stored one outranks it: measured before
        borrowed before predicted before default, and of equal origin the younger one. Returns whether it was stored."""
        require_sound_best(best)
        row = self._best_row(best)
        if row is not None and _is_readable(row):
            stored, offered = ORIGIN_RANK[Origin(row.origin)], ORIGIN_RANK[best.origin]
            if stored < offered or (stored == offered and best.created_at <= row.created_at <= latest_date()):
                return False
        self.replace_best(best)
        return True

    def replace_best(self, best: AnyBest) -> None:
        """Store the best of its place whatever is stored."""
        require_sound_best(best)
        for row in self._best_rows(best):
            if row.shape.document != document_of(best.shape):  # as an older version wrote it
                self._session.delete(row)
        self._put(BestRow, self._best_place(best), self._best_links(best) | best_columns(best))

    def bests(self, place: str) -> list[AnyBest]:
        """Return all winners of the store at a place, as they are while no other process writes."""
        return readable_records(self._session, select(BestRow), best_of, place)

    def remove_best(self, best: AnyBest) -> None:
        """Forget the best of this shape and device, unless another config has won meanwhile."""
        row = self._best_row(best)
        if row is not None and row.config.document == document_of(best.config):
            self._session.delete(row)

    def _best_row(self, best: AnyBest) -> BestRow | None:
        return next(iter(self._best_rows(best)), None)

    def _best_rows(self, best: AnyBest) -> Sequence[BestRow]:
        """Return the rows of this shape and device, in whichever way the shape is written."""
        place = self._best_place(best)
        del place["shape_id"]
        shapes = select(ShapeRow.id).where(ShapeRow.document.in_(shape_documents(best.shape)))
        return self._session.scalars(select(BestRow).filter_by(**place).where(BestRow.shape_id.in_(shapes))).all()

    def _best_place(self, best: AnyBest) -> dict[str, int]:
        """Return what tells winners apart. A shape of attention has one, of whatever kernel; an autotuned kernel's
        problem has one for each source."""
        place = {"device_id": self._device(best.device), "shape_id": self._shape(best.shape)}
        return place | ({"kernel_id": self._kernel(best)} if isinstance(best.shape, KernelProblem) else {})

    def _put(self, row_type: type[Base], key: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        """Store columns in the row with this key, which is added when missing."""
        row = self._session.scalar(select(row_type).filter_by(**key))
        if row is None:
            self._session.add(row_type(**{**key, **columns}))
        else:
            _assign(row, columns)

    def _candidate(self, trial: AnyTrial) -> dict[str, int]:
        """Return what tells trials apart."""
        return self._provenance(trial) | {"config_id": self._config(trial.config)}

    def _best_links(self, best: AnyBest) -> dict[str, int | None]:
        return self._provenance(best) | {
            "config_id": self._config(best.config),
            "default_config_id": None if best.default is None else self._config(best.default),
            "paper_config_id": None if best.paper is None else self._config(best.paper),
        }

    def _provenance(self, record: Record) -> dict[str, int]:
        return {
            "device_id": self._device(record.device),
            "shape_id": self._shape(record.shape),
            "kernel_id": self._kernel(record),
            "environment_id": self._environment(record.environment),
        }

    def _kernel(self, record: Record) -> int:
        return self._id_of(KernelRow, {"name": record.config.kernel, "source_hash": record.kernel_hash})

    def _environment(self, environment: Environment) -> int:
        return self._once(environment, self._environment_row)

    def _shape(self, shape: AttentionShape | KernelProblem) -> int:
        return self._once(shape, self._shape_row)

    def _config(self, config: KernelConfig | LaunchConfig) -> int:
        return self._once(config, self._config_row)

    def _device(self, device: DeviceSpec) -> int:
        return self._once(device, self._device_row)

    def _once(self, value: V, find: Callable[[V], int]) -> int:
        """Return the id of the value's row, which is looked for once in a transaction: thousands of records share a
        few."""
        # numbers of other types, such as 1 and True, are equal values and other texts
        key = (type(value), value.document) if isinstance(value, (KernelProblem, LaunchConfig)) else value
        if key not in self._known:
            self._known[key] = find(value)
        return self._known[key]

    def _environment_row(self, environment: Environment) -> int:
        columns = asdict(environment) | {"regime": str(environment.regime)}  # drivers differ in what an enum is to them
        return self._id_of(EnvironmentRow, {"digest": environment.digest}, columns)

    def _shape_row(self, shape: AttentionShape | KernelProblem) -> int:
        return self._id_of(ShapeRow, {"document": document_of(shape)}, shape_columns(shape))

    def _config_row(self, config: KernelConfig | LaunchConfig) -> int:
        return self._id_of(ConfigRow, {"document": document_of(config)}, config_columns(config))

    def _device_row(self, device: DeviceSpec) -> int:
        """Return the id of the device's row. What a live device says of itself replaces the catalogue's word, never the
        other way round."""
        columns = {
            "name": device.name,
            "compute_capability": device.limits.name,
            "num_sms": device.num_sms,
            "source": device.source,
            "document": document_of(replace(device, uuid=None)),
        }
        columns["checksum"] = device_checksum(str(columns["document"]))
        found = self._id_of(DeviceRow, {"key": device.key}, columns)
        row = self._session.get_one(DeviceRow, found)
        if row.document != columns["document"] and (device.source != "catalogue" or row.source == "catalogue"):
            _assign(row, columns)
        return found

    def _id_of(self, row_type: type[R], key: Mapping[str, Any], columns: Mapping[str, Any] | None = None) -> int:
        """Return the id of the row with this key, which is added when missing."""
        memo = (row_type, tuple(key.values()))
        if memo not in self._ids:
            row = self._session.scalar(select(row_type).filter_by(**key))
            if row is None:
                row = row_type(**key, **(columns or {}))
                self._session.add(row)
                self._session.flush()
            self._ids[memo] = row.id
        return self._ids[memo]


def latest_date() -> datetime:
    """Return how far ahead a date may be. One beyond it is that of a wrong clock, and outranks nothing."""
    return datetime.now(UTC) + timedelta(days=1)


def sound_trial(trial: AnyTrial) -> AnyTrial:
    """Return the trial as it can be stored.

    Raises:
        UsageError: a value is not of its kind or out of its range.
    """
    trial = replace(trial, error=storable(trial.error))
    require_sound_trial(trial)
    return trial


def _is_readable(row: BestRow) -> bool:
    """Return whether a stored winner is what was written; a damaged one outranks nothing."""
    try:
        best_of(row)
    except UNREADABLE:
        return False
    return True


def _assign(row: Base, columns: Mapping[str, Any]) -> None:
    for name, value in columns.items():
        setattr(row, name, value)


def trial_columns(trial: AnyTrial) -> dict[str, Any]:
    """Return the values of a trial's row, without what it refers to."""
    resources = trial.resources
    absent = dict.fromkeys(column.name for column in columns_of(KernelResources))
    return {
        "created_at": trial.created_at,
        "gpu_uuid": IMPORTED if trial.imported else trial.device.uuid,
        "outcome": str(trial.outcome),
        **plain_values(trial),
        **(absent if resources is None else plain_values(resources)),
        **plain_values(trial.telemetry),
        "checksum": record_checksum(trial),
    }


def storable(text: str) -> str:
    """Return a compiler's or driver's words, without what a database's text cannot hold or a terminal would obey."""
    return shown(text[: ERROR.longest], ERROR.longest)[: ERROR.longest]


def best_columns(best: AnyBest) -> dict[str, Any]:
    """Return the values of a winner's row, without what it refers to."""
    return {
        "created_at": best.created_at,
        "gpu_uuid": best.device.uuid,
        "origin": str(best.origin),
        **plain_values(best),
        "checksum": record_checksum(best),
        "served_checksum": served_checksum(best),
    }
