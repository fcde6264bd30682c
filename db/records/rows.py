"""Records to rows and back.

Rows may come from anyone's database, so every value that is read goes through the validating constructors of its room.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from blocktune.db.records.bounds import MAX_ERROR, require_sound_best, require_sound_trial
from blocktune.db.records.records import ORIGIN_RANK, Best, Environment, Outcome, Telemetry, Trial
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
from blocktune.db.tables.user_models import UserBestRow, UserTrialRow
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape

_RESOURCES = tuple(field.name for field in fields(KernelResources))
_TELEMETRY = tuple(field.name for field in fields(Telemetry))
_ENVIRONMENT = tuple(field.name for field in fields(Environment))

IMPORTED = "imported"
"""Stands where the UUID of the GPU stands otherwise: the trial came in a document and nobody made it again here."""

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What making a record of a row that anyone may have written can raise; `UsageError` is a ValueError."""

R = TypeVar("R", DeviceRow, EnvironmentRow, KernelRow, ShapeRow, ConfigRow)


def document_of(value: AttentionShape | KernelConfig | DeviceSpec) -> str:
    """The value's canonical JSON text: equal values, equal text."""
    return json.dumps(value.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)


class RowWriter:
    """Writes records in one transaction of the store's single writer; so looking up and then adding cannot race."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids: dict[tuple[type[Base], tuple[Any, ...]], int] = {}

    def put_trial(self, trial: Trial, *, only_newer: bool = False) -> bool:
        """Stores the trial in place of an earlier one of the same candidate; with `only_newer`, unless that one is
        younger or was made here and this one was not. Returns whether it was stored."""
        trial = replace(trial, error=storable(trial.error))
        require_sound_trial(trial)
        key = self._provenance(trial) | {"config_id": self._config(trial.config)}
        row = self._session.scalar(select(TrialRow).filter_by(**key))
        if row is None:
            self._session.add(TrialRow(**key, **_trial_columns(trial)))
        elif only_newer and _standing(row.gpu_uuid == IMPORTED, row) >= _standing(trial.imported, trial):
            return False
        else:
            _assign(row, _trial_columns(trial))
        return True

    def put_best(self, best: Best) -> bool:
        """Stores the best of its shape and device unless the stored one outranks it: measured before borrowed before
        predicted before default, and of equal origin the younger one. Returns whether it was stored."""
        require_sound_best(best)
        row = self._best_row(best)
        if row is not None:
            stored, offered = ORIGIN_RANK[Origin(row.origin)], ORIGIN_RANK[best.origin]
            if stored < offered or (stored == offered and row.created_at >= best.created_at):
                return False
        self.replace_best(best)
        return True

    def replace_best(self, best: Best) -> None:
        """Stores the best of its shape and device whatever is stored."""
        require_sound_best(best)
        row = self._best_row(best)
        links = self._provenance(best) | {
            "config_id": self._config(best.config),
            "default_config_id": None if best.default is None else self._config(best.default),
            "paper_config_id": None if best.paper is None else self._config(best.paper),
        }
        if row is None:
            self._session.add(BestRow(**links, **_best_columns(best)))
        else:
            _assign(row, links | _best_columns(best))

    def best_rows(self) -> Sequence[BestRow]:
        """All winners, as they are while nobody else writes."""
        return self._session.scalars(select(BestRow)).all()

    def remove_best(self, best: Best) -> None:
        """Forgets the best of this shape and device, unless another config has won meanwhile."""
        row = self._best_row(best)
        if row is not None and row.config.document == document_of(best.config):
            self._session.delete(row)

    def _best_row(self, best: Best) -> BestRow | None:
        links = self._provenance(best)
        return self._session.scalar(select(BestRow).filter_by(device_id=links["device_id"], shape_id=links["shape_id"]))

    def _provenance(self, record: Trial | Best) -> dict[str, int | None]:
        # the features are in the document alone: no query asks for them
        shape = {name: value for name, value in record.shape.to_json().items() if name != "features"}
        kernel = {"name": record.config.kernel, "source_hash": record.kernel_hash}
        return {
            "device_id": self._device(record.device),
            "shape_id": self._id_of(ShapeRow, {"document": document_of(record.shape)}, shape),
            "kernel_id": self._id_of(KernelRow, kernel),
            "environment_id": self._environment(record.environment),
        }

    def _environment(self, environment: Environment) -> int:
        columns = asdict(environment) | {"regime": str(environment.regime)}  # drivers differ in what an enum is to them
        return self._id_of(EnvironmentRow, {"digest": environment.digest}, columns)

    def _config(self, config: KernelConfig) -> int:
        names = ("kernel", "block_m", "block_n", "num_warps", "num_stages")
        return self._id_of(
            ConfigRow, {"document": document_of(config)}, {name: getattr(config, name) for name in names}
        )

    def _device(self, device: DeviceSpec) -> int:
        """What a live device says of itself replaces the catalogue's word, never the other way round."""
        columns = {
            "name": device.name,
            "compute_capability": device.limits.name,
            "num_sms": device.num_sms,
            "source": device.source,
            "document": document_of(replace(device, uuid=None)),
        }
        found = self._id_of(DeviceRow, {"key": device.key}, columns)
        row = self._session.get_one(DeviceRow, found)
        if row.document != columns["document"] and (device.source != "catalogue" or row.source == "catalogue"):
            _assign(row, columns)
        return found

    def _id_of(self, row_type: type[R], key: Mapping[str, Any], columns: Mapping[str, Any] | None = None) -> int:
        """The id of the row with this key, which is added when missing."""
        memo = (row_type, tuple(key.values()))
        if memo not in self._ids:
            row = self._session.scalar(select(row_type).filter_by(**key))
            if row is None:
                row = row_type(**key, **(columns or {}))
                self._session.add(row)
                self._session.flush()
            self._ids[memo] = row.id
        return self._ids[memo]


def _standing(imported: bool, record: Trial | TrialRow) -> tuple[bool, datetime]:
    """What of two trials of one candidate stays: one made here, then the younger."""
    return not imported, record.created_at


def _assign(row: Base, columns: Mapping[str, Any]) -> None:
    for name, value in columns.items():
        setattr(row, name, value)


def _trial_columns(trial: Trial) -> dict[str, Any]:
    resources = dict.fromkeys(_RESOURCES) if trial.resources is None else trial.resources.to_json()
    return {
        "created_at": trial.created_at,
        "gpu_uuid": IMPORTED if trial.imported else trial.device.uuid,
        "outcome": str(trial.outcome),
        "error": trial.error,
        "time_us": trial.time_us,
        "relative_to_anchor": trial.relative_to_anchor,
        "predicted_us": trial.predicted_us,
        "samples_us": list(trial.samples_us),
        "compile_seconds": trial.compile_seconds,
        "bench_seconds": trial.bench_seconds,
        "blocks_per_sm": trial.blocks_per_sm,
        "occupancy": trial.occupancy,
        "limiters": list(trial.limiters),
        **resources,
        **asdict(trial.telemetry),
    }


def storable(text: str) -> str:
    """A compiler's or driver's words, without what a database's text cannot hold or a terminal would obey."""
    printable = "".join(sign if sign.isprintable() or sign in "\n\t" else _spelt(sign) for sign in text[:MAX_ERROR])
    return printable[:MAX_ERROR]


def _spelt(sign: str) -> str:
    return sign.encode("unicode_escape", "surrogatepass").decode()


def _best_columns(best: Best) -> dict[str, Any]:
    return {
        "created_at": best.created_at,
        "gpu_uuid": best.device.uuid,
        "origin": str(best.origin),
        "time_us": best.time_us,
        "predicted_us": best.predicted_us,
        "default_time_us": best.default_time_us,
        "paper_time_us": best.paper_time_us,
        "speedup_over_default": best.speedup_over_default,
        "speedup_low": best.speedup_low,
        "speedup_high": best.speedup_high,
        "trials": best.trials,
    }


def require_links(row: TrialRow | BestRow | UserTrialRow | UserBestRow) -> None:
    """Checks that the rows that a row refers to are there: one that leads nowhere must not vanish in silence.

    Raises:
        UsageError: one is not.
    """
    for key in row.__table__.foreign_keys:
        name = key.parent.name.removesuffix("_id")
        if getattr(row, key.parent.name) is not None and getattr(row, name) is None:
            raise UsageError(
                f"A row of `{row.__tablename__}` must refer to a {name} that is there, but row {row.id} does not."
            )


def device_of(row: DeviceRow) -> DeviceSpec:
    """The device of this row.

    Raises:
        one of UNREADABLE: a value is out of range; blocktune wrote none such.
    """
    return _parsed_device(row.document, None)


def trial_of(row: TrialRow) -> Trial:
    """The record of this row.

    Raises:
        one of UNREADABLE: a value is out of range; blocktune wrote none such.
    """
    require_links(row)
    resources = {name: getattr(row, name) for name in _RESOURCES}
    imported = row.gpu_uuid == IMPORTED
    trial = Trial(
        device=_parsed_device(row.device.document, None if imported else row.gpu_uuid),
        environment=environment_of(row.environment),
        shape=_parsed_shape(row.shape.document),
        config=_parsed_config(row.config.document),
        kernel_hash=row.kernel.source_hash,
        outcome=Outcome(row.outcome),
        resources=None if row.registers is None else KernelResources(**resources),
        blocks_per_sm=row.blocks_per_sm,
        occupancy=row.occupancy,
        limiters=tuple(row.limiters),
        predicted_us=row.predicted_us,
        time_us=row.time_us,
        relative_to_anchor=row.relative_to_anchor,
        samples_us=tuple(row.samples_us),
        error=row.error,
        compile_seconds=row.compile_seconds,
        bench_seconds=row.bench_seconds,
        telemetry=Telemetry(**{name: getattr(row, name) for name in _TELEMETRY}),
        created_at=row.created_at,
        imported=imported,
    )
    require_sound_trial(trial)
    return trial


def best_of(row: BestRow) -> Best:
    """The record of this row.

    Raises:
        one of UNREADABLE: a value is out of range; blocktune wrote none such.
    """
    require_links(row)
    best = Best(
        device=_parsed_device(row.device.document, row.gpu_uuid),
        environment=environment_of(row.environment),
        shape=_parsed_shape(row.shape.document),
        config=_parsed_config(row.config.document),
        kernel_hash=row.kernel.source_hash,
        origin=Origin(row.origin),
        time_us=row.time_us,
        predicted_us=row.predicted_us,
        default=None if row.default_config is None else _parsed_config(row.default_config.document),
        default_time_us=row.default_time_us,
        paper=None if row.paper_config is None else _parsed_config(row.paper_config.document),
        paper_time_us=row.paper_time_us,
        speedup_over_default=row.speedup_over_default,
        speedup_low=row.speedup_low,
        speedup_high=row.speedup_high,
        trials=row.trials,
        created_at=row.created_at,
    )
    require_sound_best(best)
    return best


def environment_of(row: EnvironmentRow) -> Environment:
    """The software and regime of this row; what it is part of checks them. A regime that is none raises ValueError."""
    return Environment.from_json({name: getattr(row, name) for name in _ENVIRONMENT})


# A sweep's trials share one device and one shape; parsing each once keeps reading thousands of rows quick.
@lru_cache(maxsize=64)
def _parsed_device(document: str, uuid: str | None) -> DeviceSpec:
    return replace(DeviceSpec.from_json(json.loads(document)), uuid=uuid)


@lru_cache(maxsize=1024)
def _parsed_shape(document: str) -> AttentionShape:
    return AttentionShape.from_json(json.loads(document))


@lru_cache(maxsize=4096)
def _parsed_config(document: str) -> KernelConfig:
    return KernelConfig.from_json(json.loads(document))
