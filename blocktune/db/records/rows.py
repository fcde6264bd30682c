"""Rows to records.

Rows may come from anyone's database, so every value that is read goes through the validating constructors of its room.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from blocktune.db.records.bounds import require_sound_best, require_sound_trial
from blocktune.db.records.linked_rows import LinkedRow, links_of
from blocktune.db.records.records import AnyBest, AnyTrial, Best, Environment, Outcome, Record, Telemetry, Trial
from blocktune.db.records.row_checksums import device_checksum, record_checksum, served_checksum
from blocktune.db.tables.models import (
    Base,
    BestRow,
    ConfigRow,
    DeviceRow,
    EnvironmentRow,
    ShapeRow,
    TrialRow,
)
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.column_kinds import record_values
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape, Causal
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig, LaunchProblem

_ENVIRONMENT = tuple(field.name for field in fields(Environment))
_environment_values = attrgetter(*_ENVIRONMENT)

IMPORTED = "imported"
"""Stands in place of the GPU's UUID: the trial came in a document and was not made again here."""

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What making a record of a row that anyone may have written can raise; `UsageError` is a ValueError."""


def document_of(value: AttentionShape | KernelProblem | KernelConfig | LaunchConfig | DeviceSpec) -> str:
    """Return the value's canonical JSON text: equal values, equal text. That of an autotuned kernel is without the
    kernel's name, which stands in a row of its own."""
    return value.document if isinstance(value, (KernelProblem, LaunchConfig)) else _canonical_text(value.to_json())


def _canonical_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def shape_documents(shape: AttentionShape | KernelProblem) -> tuple[str, ...]:
    """Return the documents under which stores may hold a shape: its own first, then those of older versions, which did
    not write what is causal from either corner in one way."""
    if isinstance(shape, KernelProblem):
        return (shape.document,)
    own = shape.to_json()
    square = shape.causal is Causal.UPPER_LEFT and shape.seqlen_q == shape.seqlen_k
    single = shape.causal is Causal.NONE and shape.seqlen_q == 1
    older = [own | {"causal": str(Causal.LOWER_RIGHT)}] if square or single else []
    return tuple(map(_canonical_text, (own, *older)))


def require_links(row: TrialRow | BestRow | LinkedRow) -> None:
    """Check that the rows that a row refers to are there: one that leads nowhere must not vanish in silence.

    Raises:
        UsageError: one is not.
    """
    for name in links_of(row.__table__):
        if getattr(row, name) is None and getattr(row, f"{name}_id") is not None:
            raise UsageError(f"Row {row.id} of `{row.__tablename__}` refers to a {name} that does not exist.")


def require_as_written(record: Record, checksum: str | None, documents: Mapping[str, str] | None = None) -> None:
    """Check that a record is what was stored. A row of an older blocktune may have no checksum, and is believed.

    Args:
        record: what was made of the row.
        checksum: of the row.
        documents: the texts that fields of the record were made of. Mostly they are as blocktune writes them today,
            and need not be written again to be compared.

    Raises:
        UsageError: it is not.
    """
    if checksum is None or (documents and record_checksum(record, documents) == checksum):
        return
    if record_checksum(record) != checksum:
        raise UsageError(
            "The row, or a row that it refers to, was changed after it was written: its content does not match its "
            "checksum."
        )


def device_of(row: DeviceRow, uuid: str | None = None) -> DeviceSpec:
    """Return the device of this row.

    Args:
        row: says what kind of GPU it is.
        uuid: which piece.

    Raises:
        one of UNREADABLE: a value is out of range, or not as it was written.
    """
    if row.checksum not in (None, _device_checksum(row.document)):
        raise UsageError(
            f"The device {row.key!r:.100} was changed after it was written: its content does not match its checksum."
        )
    return _parsed_device(row.document, uuid)


def whole_device(row: DeviceRow) -> DeviceSpec:
    """Return the device of this row, whose columns repeat it for queries. Raises the errors of `device_of`."""
    device = device_of(row)
    told = {"compute_capability": device.limits.name, "num_sms": device.num_sms, "source": device.source}
    _require_repeated(row, told | {"key": device.key, "name": device.name})
    return device


def whole_environment(row: EnvironmentRow) -> Environment:
    """Return the software of this row, whose digest is its own. Raises the errors of `device_of`."""
    environment = environment_of(row)
    _require_repeated(row, {"digest": environment.digest})
    return environment


def is_attention(row: ShapeRow) -> bool:
    """Return whether a row holds a shape of attention; else it is a problem of autotuned kernels."""
    return row.direction is not None


def whole_shape(row: ShapeRow) -> AttentionShape | LaunchProblem:
    """Return the shape of this row, whose columns repeat its document. Raises the errors of `device_of`."""
    _require_repeated(row, repeated_shape(row))
    return _parsed_shape(row.document) if is_attention(row) else _parsed_problem(row.document)


def repeated_shape(row: ShapeRow) -> dict[str, Any]:
    """Return what the columns of a shape's row repeat. Raises the errors of `device_of`."""
    if not is_attention(row):
        return _NO_SHAPE_COLUMNS
    written = json.loads(row.document)  # an older blocktune may have spelled the shape in another way
    return {name: value for name, value in written.items() if name != "features"}


def whole_config(row: ConfigRow) -> KernelConfig | LaunchConfig:
    """Return the config of this row, whose columns repeat it; that of autotuned kernels without a kernel's name. Raises
    the errors of `device_of`."""
    _require_repeated(row, repeated_config(row))
    return _parsed_parameters("", row.document) if row.kernel is None else _parsed_config(row.document)


def repeated_config(row: ConfigRow) -> dict[str, Any]:
    """Return what the columns of a config's row repeat. Raises the errors of `device_of`."""
    written = json.loads(row.document)
    return config_columns(_parsed_config(row.document)) if "kernel" in written else dict.fromkeys(_CONFIG_COLUMNS)


def _require_repeated(row: Base, columns: Mapping[str, Any]) -> None:
    if any(getattr(row, name) != value for name, value in columns.items()):
        raise UsageError(f"The columns {', '.join(columns)} contradict the document of their row.")


_CONFIG_COLUMNS = ("kernel", "block_m", "block_n", "num_warps", "num_stages")
_NO_SHAPE_COLUMNS = dict.fromkeys(column.name for column in ShapeRow.__table__.columns if column.nullable)


def shape_columns(shape: AttentionShape | KernelProblem) -> dict[str, Any]:
    """Return what queries ask of a shape; its features are in the document alone."""
    if isinstance(shape, KernelProblem):
        return _NO_SHAPE_COLUMNS
    return {name: value for name, value in shape.to_json().items() if name != "features"}


def config_columns(config: KernelConfig | LaunchConfig) -> dict[str, Any]:
    """Return what queries ask of a config."""
    if isinstance(config, LaunchConfig):
        return dict.fromkeys(_CONFIG_COLUMNS)
    return {name: getattr(config, name) for name in _CONFIG_COLUMNS}


def trial_of(row: TrialRow | LinkedRow) -> AnyTrial:
    """Return the record of this row.

    Raises:
        one of UNREADABLE: a value is out of range, or the row is not as it was written.
    """
    trial = unverified_trial(row)
    require_as_written(trial, row.checksum, _documents_of(row, {"shape": row.shape, "config": row.config}))
    return trial


def whole_trial(row: TrialRow) -> AnyTrial:
    """Return the record of this row, whose kernel's row has the name that its config says. Raises the errors of
    `trial_of`."""
    trial = trial_of(row)
    _require_repeated(row.kernel, {"name": trial.config.kernel})
    return trial


def whole_best(row: BestRow) -> AnyBest:
    """Return the record of this row as `whole_trial` does; production has to find it sound, too."""
    best = best_of(row)
    _require_repeated(row.kernel, {"name": best.config.kernel})
    if row.checksum is not None:
        _require_repeated(row, {"served_checksum": served_checksum(best, view_documents(row))})
    return best


def view_documents(row: BestRow | LinkedRow) -> dict[str, str]:
    """Return the texts of a winner's row that the view `dispatch` repeats, as they were written."""
    return {"shape": row.shape.document, "config": row.config.document}


def unverified_trial(row: TrialRow | LinkedRow) -> AnyTrial:
    """Return the record of this row, whatever its checksum is. Raises the errors of `trial_of`."""
    require_links(row)
    compiled = record_values(KernelResources, row)
    imported = row.gpu_uuid == IMPORTED
    trial = Trial(
        device=device_of(row.device, None if imported else row.gpu_uuid),
        environment=environment_of(row.environment),
        shape=_shape_of(row),
        config=_config_of(row, row.config),
        kernel_hash=row.kernel.source_hash,
        outcome=Outcome(row.outcome),
        resources=None if compiled["registers"] is None else KernelResources(**compiled),
        telemetry=Telemetry(**record_values(Telemetry, row)),
        created_at=row.created_at,
        imported=imported,
        **record_values(Trial, row),
    )
    require_sound_trial(trial)
    return trial


def best_of(row: BestRow | LinkedRow) -> AnyBest:
    """Return the record of this row.

    Raises:
        one of UNREADABLE: a value is out of range, or the row is not as it was written.
    """
    best = unverified_best(row)
    linked = {"shape": row.shape, "config": row.config, "default": row.default_config, "paper": row.paper_config}
    require_as_written(best, row.checksum, _documents_of(row, linked))
    return best


def unverified_best(row: BestRow | LinkedRow) -> AnyBest:
    """Return the record of this row, whatever its checksum is. Raises the errors of `best_of`."""
    require_links(row)
    best = Best(
        device=device_of(row.device, row.gpu_uuid),
        environment=environment_of(row.environment),
        shape=_shape_of(row),
        config=_config_of(row, row.config),
        kernel_hash=row.kernel.source_hash,
        origin=Origin(row.origin),
        default=None if row.default_config is None else _config_of(row, row.default_config),
        paper=None if row.paper_config is None else _config_of(row, row.paper_config),
        created_at=row.created_at,
        **record_values(Best, row),
    )
    require_sound_best(best)
    return best


def _shape_of(row: TrialRow | BestRow | LinkedRow) -> AttentionShape | KernelProblem:
    if is_attention(row.shape):
        return _parsed_shape(row.shape.document)
    return KernelProblem(row.kernel.name, _parsed_problem(row.shape.document))


def _config_of(row: TrialRow | BestRow | LinkedRow, config: ConfigRow) -> KernelConfig | LaunchConfig:
    if is_attention(row.shape):
        return _parsed_config(config.document)
    return _parsed_parameters(row.kernel.name, config.document)


def _documents_of(
    row: TrialRow | BestRow | LinkedRow, linked: Mapping[str, ShapeRow | ConfigRow | None]
) -> dict[str, str]:
    """Return the texts that fields of a record are made of. Those of autotuned kernels lack the kernel's name."""
    if not is_attention(row.shape):
        return {}
    return {name: target.document for name, target in linked.items() if target is not None}


def environment_of(row: EnvironmentRow) -> Environment:
    """Return the software and regime of this row; what it is part of checks them.

    Raises:
        ValueError: the regime is unknown.
    """
    return _parsed_environment(*_environment_values(row))


# A sweep's trials share one device and one shape; parsing each once keeps reading thousands of rows quick.
@lru_cache(maxsize=64, typed=True)
def _parsed_environment(*values: Any) -> Environment:
    return Environment.from_json(dict(zip(_ENVIRONMENT, values, strict=True)))


@lru_cache(maxsize=64)
def _parsed_device(document: str, uuid: str | None) -> DeviceSpec:
    return replace(DeviceSpec.from_json(json.loads(document)), uuid=uuid)


@lru_cache(maxsize=64)
def _device_checksum(document: str) -> str:
    return device_checksum(document)


@lru_cache(maxsize=1024)
def _parsed_shape(document: str) -> AttentionShape:
    return AttentionShape.from_json(json.loads(document))


@lru_cache(maxsize=1024)
def _parsed_problem(document: str) -> LaunchProblem:
    return LaunchProblem.from_document(document)


@lru_cache(maxsize=4096)
def _parsed_parameters(kernel: str, document: str) -> LaunchConfig:
    return LaunchConfig.from_document(kernel, document)


@lru_cache(maxsize=4096)
def _parsed_config(document: str) -> KernelConfig:
    return KernelConfig.from_json(json.loads(document))
