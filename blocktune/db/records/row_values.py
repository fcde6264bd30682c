"""Rows of devices, environments, shapes and configs as values, and the columns of values.

Rows may come from anyone's database, so every value that is read goes through the validating constructors of its room.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from blocktune.db.records.records import Environment
from blocktune.db.records.row_checksums import device_checksum
from blocktune.db.tables.models import (
    Base,
    ConfigRow,
    DeviceRow,
    EnvironmentRow,
    ShapeRow,
)
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import KernelConfig
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
    require_repeated(row, told | {"key": device.key, "name": device.name})
    return device


def whole_environment(row: EnvironmentRow) -> Environment:
    """Return the software of this row, whose digest is its own. Raises the errors of `device_of`."""
    environment = environment_of(row)
    require_repeated(row, {"digest": environment.digest})
    return environment


def is_attention(row: ShapeRow) -> bool:
    """Return whether a row holds a shape of attention; else it is a problem of autotuned kernels."""
    return row.direction is not None


def whole_shape(row: ShapeRow) -> AttentionShape | LaunchProblem:
    """Return the shape of this row, whose columns repeat its document. Raises the errors of `device_of`."""
    require_repeated(row, repeated_shape(row))
    return parsed_shape(row.document) if is_attention(row) else parsed_problem(row.document)


def repeated_shape(row: ShapeRow) -> dict[str, Any]:
    """Return what the columns of a shape's row repeat. Raises the errors of `device_of`."""
    if not is_attention(row):
        return _NO_SHAPE_COLUMNS
    written = json.loads(row.document)  # an older blocktune may have spelled the shape in another way
    return {name: value for name, value in written.items() if name != "features"}


def whole_config(row: ConfigRow) -> KernelConfig | LaunchConfig:
    """Return the config of this row, whose columns repeat it; that of autotuned kernels without a kernel's name. Raises
    the errors of `device_of`."""
    require_repeated(row, repeated_config(row))
    return parsed_parameters("", row.document) if row.kernel is None else parsed_config(row.document)


def repeated_config(row: ConfigRow) -> dict[str, Any]:
    """Return what the columns of a config's row repeat. Raises the errors of `device_of`."""
    written = json.loads(row.document)
    return config_columns(parsed_config(row.document)) if "kernel" in written else dict.fromkeys(_CONFIG_COLUMNS)


def require_repeated(row: Base, columns: Mapping[str, Any]) -> None:
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
def parsed_shape(document: str) -> AttentionShape:
    return AttentionShape.from_json(json.loads(document))


@lru_cache(maxsize=1024)
def parsed_problem(document: str) -> LaunchProblem:
    return LaunchProblem.from_document(document)


@lru_cache(maxsize=4096)
def parsed_parameters(kernel: str, document: str) -> LaunchConfig:
    return LaunchConfig.from_document(kernel, document)


@lru_cache(maxsize=4096)
def parsed_config(document: str) -> KernelConfig:
    return KernelConfig.from_json(json.loads(document))
