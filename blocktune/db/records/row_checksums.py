"""The text that the checksum of a stored row covers.

A trial's or winner's covers the whole record, with what it refers to: one checksum finds a flipped bit in the row, in
its shape or in its software. A winner's row has a second one, of what production reads, which reads no more than that.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from blocktune.db.records.records import AnyBest, Environment, Record, Telemetry, Trial
from blocktune.kernels.files.checksums import checksum_of
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig

_PLAIN = {str, int, float, bool}
"""The types of most values, which are JSON as they are."""

_NO_DOCUMENTS: Mapping[str, str] = {}


def record_checksum(record: Record, documents: Mapping[str, str] = _NO_DOCUMENTS) -> str:
    """Return the checksum of a trial's or winner's row.

    A field at its default is left out, so that a field that comes later changes no older checksum.

    Args:
        record: the trial or winner.
        documents: texts that stand for some of its shape and configs, by field; the others are written here.
    """
    imported = isinstance(record, Trial) and record.imported  # the row of such a trial has no room for the GPU
    values = {"gpu_uuid": None if imported else record.device.uuid}
    for name, default in _defaults_of(type(record)):
        value = getattr(record, name)
        if name in documents:
            values[name] = documents[name]
        elif default is MISSING or value != default:
            values[name] = value if type(value) in _PLAIN else _plain(value)
    return checksum_of(values)


_DEFAULTS: dict[type[Any], tuple[tuple[str, Any], ...]] = {}


def _defaults_of(record_type: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a record with their defaults."""
    if record_type not in _DEFAULTS:  # thousands of rows share a few types
        _DEFAULTS[record_type] = tuple((field.name, field.default) for field in fields(record_type))
    return _DEFAULTS[record_type]


def served_checksum(best: AnyBest, written: Mapping[str, str] | None = None) -> str:
    """Return the checksum of what the view `dispatch` says of a winner, or `user_dispatch` of one of an autotuned
    kernel.

    Args:
        best: the winner.
        written: the texts of `shape` and `config` in its row, where it has one. An older blocktune may have spelled
            them in another way, which the view repeats.
    """
    if isinstance(best.shape, KernelProblem):
        said = _kernel_values(best)
    else:
        said = _attention_values(best) | dict(written or {})
    versions = {name: getattr(best.environment, name) for name in ("triton", "ptxas", "driver")}
    return checksum_of({"device_key": best.device.key, "time_us": best.time_us, **versions, **said})


def _attention_values(best: AnyBest) -> dict[str, Any]:
    return {
        "shape": _document(best.shape),
        "config": _document(best.config),
        "kernel_hash": best.kernel_hash,
        "origin": str(best.origin),
        "power_limit_w": best.environment.power_limit_w,
    }


def _kernel_values(best: AnyBest) -> dict[str, Any]:
    return {
        "kernel": best.shape.kernel,
        "source_hash": best.kernel_hash,
        "problem": best.shape.document,
        "config": best.config.document,
    }


def device_checksum(document: str) -> str:
    """Return the checksum of a device's row."""
    return checksum_of({"document": document})


def _plain(value: Any) -> Any:
    """Return the JSON that stands for a field of a record."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, DeviceSpec):
        return value.key
    if isinstance(value, (AttentionShape, KernelConfig, Environment)):
        return _document(value)
    if isinstance(value, (KernelProblem, LaunchConfig)):
        return {"kernel": value.kernel, "document": value.document}
    if isinstance(value, KernelResources):
        return value.to_json()
    if isinstance(value, Telemetry):
        return {name: state for name, state in asdict(value).items() if state is not None}
    return value


@lru_cache(maxsize=4096)
def _document(value: AttentionShape | KernelConfig | Environment) -> str:
    return canonical_text(value.to_json())
