"""Results as one JSON document: how they travel between machines and how they are shipped.

    {
      "format": "blocktune-results",
      "schema": 1,
      "device": {...},                    what DeviceSpec.to_json gives, without the uuid of one piece of hardware
      "device_checksum": "<16 hex>",      only in an export: of the device; a file whose device was edited goes without
      "environments": {                   by Environment.digest
        "<digest>": {"triton", "ptxas", "torch", "cuda", "driver", "protocol", "power_limit_w",
                     "regime"}        `burst`; left out where it is sustained
      },
      "bests": [
        {
          "shape": {...},                 AttentionShape.to_json; of an autotuned kernel KernelProblem.to_json
          "config": {...},                KernelConfig.to_json; of an autotuned kernel LaunchConfig.to_json
          "kernel_hash": "<16 hex>",      the version of the kernel's code
          "environment": "<digest>",
          "origin": "measured",           or borrowed, predicted, default
          "time_us", "predicted_us",      microseconds or null; a measured one has a time
          "default": {...} | null, "default_time_us",      what it was compared with, in the same run
          "paper": {...} | null, "paper_time_us",
          "speedup_over_default", "speedup_low", "speedup_high",
          "trials": 120,                  how many candidates were tried
          "created_at": "2026-11-20T12:00:00+00:00",
          "checksum": "<16 hex>"          of row, device and environment; an edited row goes without
        }
      ],
      "trials": [...],                    only on request: the fields of Trial in db/records/records.py
      "sha256": "<64 hex>",               only in a frozen file: of the document's canonical text without this field
      "signature": "<128 hex>"            only in a signed one: Ed25519 of the hash
    }

One document holds one device. Every other field is written, keys and rows are sorted: equal results give equal text.
Reading (db/exchange/importing.py) takes an absent optional field as null and rejects what it does not know. All of it
is data: nothing in a document is ever run.
"""

import errno
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any, BinaryIO

from blocktune.db.records.records import AnyBest, AnyTrial, Environment
from blocktune.kernels.files.checksums import CHECKSUM, DEVICE_CHECKSUM, checksum_of
from blocktune.kernels.files.file_path import FOR_ALL, file_path, replace_file
from blocktune.kernels.files.reading import is_database, read_json
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.limits import limits_for
from blocktune.kernels.values.column_kinds import document_values, plain_values
from blocktune.kernels.values.errors import ImportRejectedError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.autotuned.config import KernelProblem
from blocktune.runtime.store_reader.export_file import RESULTS_FORMAT, exported_checksum, seal_of

logger = logging.getLogger("blocktune")

FORMAT, FORMAT_VERSION = RESULTS_FORMAT

Document = dict[str, Any]


def document_from(device: DeviceSpec, bests: Iterable[AnyBest], trials: Iterable[AnyTrial] | None) -> Document:
    """Return the document of one device's results."""
    bests = sorted(bests, key=_order)
    kept = sorted(trials or (), key=_order)
    used = {record.environment for record in bests} | {record.environment for record in kept}
    environments = {environment.digest: environment.to_json() for environment in sorted(used, key=_digest)}
    document: Document = {
        "format": FORMAT,
        "schema": FORMAT_VERSION,
        "device": replace(device, uuid=None).to_json(),
        "environments": environments,
        "bests": [_with_checksum(device, _best_json(best), environments) for best in bests],
    }
    if trials is not None:
        document["trials"] = [_with_checksum(device, _trial_json(trial), environments) for trial in kept]
    return document


def export_document(device: DeviceSpec, bests: Iterable[AnyBest], trials: Iterable[AnyTrial] | None) -> Document:
    """Return the document of one device's results for a file of its own, whose device has a checksum too."""
    document = document_from(device, bests, trials)
    return document | {DEVICE_CHECKSUM: checksum_of(document["device"])}


def _with_checksum(device: DeviceSpec, row: Document, environments: Document) -> Document:
    return row | {CHECKSUM: exported_checksum(row, device.key, environments[row["environment"]])}


def _digest(environment: Environment) -> str:
    return environment.digest


def _order(record: AnyBest | AnyTrial) -> tuple[Any, ...]:
    return (*problem_order(record.shape), record.config.label, record.environment.digest, record.kernel_hash)


def problem_order(shape: AttentionShape | KernelProblem) -> tuple[Any, ...]:
    """Return a key that sorts what was tuned: attention first, then autotuned kernels by their names."""
    return (1, shape.kernel, shape.document) if isinstance(shape, KernelProblem) else (0, *shape_order(shape))


def shape_order(shape: AttentionShape) -> tuple[Any, ...]:
    """Return a key that sorts shapes as people expect: by what the code is, then by size."""
    return (*shape_code(shape), shape.seqlen_q, shape.seqlen_k, shape.num_heads, shape.num_heads_kv, shape.batch)


def shape_code(shape: AttentionShape) -> tuple[Any, ...]:
    """Return what the code of a shape's kernels depends on, besides the sizes."""
    return shape.direction, shape.dtype, shape.causal, shape.head_dim, shape.head_dim_v, shape.features.label


def _provenance_json(record: AnyBest | AnyTrial) -> Document:
    return {
        "shape": record.shape.to_json(),
        "config": record.config.to_json(),
        "kernel_hash": record.kernel_hash,
        "environment": record.environment.digest,
        "created_at": record.created_at.astimezone(UTC).isoformat(),
    }


def _best_json(best: AnyBest) -> Document:
    return _provenance_json(best) | {
        "origin": str(best.origin),
        "default": None if best.default is None else best.default.to_json(),
        "paper": None if best.paper is None else best.paper.to_json(),
        **document_values(best),
    }


def _trial_json(trial: AnyTrial) -> Document:
    return _provenance_json(trial) | {
        "outcome": str(trial.outcome),
        "resources": None if trial.resources is None else plain_values(trial.resources),
        "telemetry": plain_values(trial.telemetry),
        **document_values(trial),
    }


FROZEN_FIELDS = ("shape", "config", "kernel_hash", "environment", "created_at", "origin", "time_us")
"""What of a winner production needs: which config, for what, and how sure that is."""


def frozen_document(device: DeviceSpec, bests: Iterable[AnyBest]) -> Document:
    """Return the winners of one device for production: without what they won against, and sealed by a hash of the
    content.

    Equal winners give an equal document, byte for byte in the text of `canonical_text`, wherever it is made.
    """
    document = document_from(device, bests, None)
    rows = [{name: best[name] for name in FROZEN_FIELDS} for best in document["bests"]]
    document["bests"] = [_with_checksum(device, row, document["environments"]) for row in rows]
    document["device"] = _kind_of(device).to_json()
    return document | {"sha256": seal_of(document)}


def _kind_of(device: DeviceSpec) -> DeviceSpec:
    """Return what makes two devices the same: one piece's own memory or clock must not change a frozen file."""
    return DeviceSpec(name=device.name, limits=limits_for(device.limits.cc), num_sms=device.num_sms, source="catalogue")


def save_document(document: Document, path: str | Path) -> None:
    """Write the document in a text for people; a reader sees the old file or the whole new one.

    Raises:
        OSError: the place cannot be written.
    """
    save_text(json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n", path)


def save_text(text: str, path: str | Path) -> None:
    """Write a text as `save_bytes` does, in UTF-8."""
    save_bytes(text.encode(), path)


def save_bytes(content: bytes, path: str | Path) -> None:
    """Write a file at once: a reader sees the old one or the whole new one. A link is replaced, not followed. What is
    no file, such as a device, a pipe or the standard output by its name, is written into and stays what it is.

    Raises:
        OSError: the place cannot be written, or a database is there, which an output does not replace.
    """
    path = file_path(path)
    _require_no_database(path)
    if _is_stream(path):
        with _opened_stream(path) as stream:
            stream.write(content)
        return
    replace_file(path, content, FOR_ALL)


def _require_no_database(path: Path) -> None:
    """Check that a file to be replaced is no database.

    Raises:
        OSError: it is one.
    """
    if path.is_file() and is_database(path):
        raise OSError(errno.EEXIST, "it is a database, which an output does not replace", str(path))


def _is_stream(path: Path) -> bool:
    """Return whether there is something that is no file, or one of this process's open files by its number."""
    if path.exists() and not path.is_file():
        return True
    links = (os.path.realpath(path.parent), os.readlink(path) if path.is_symlink() else "")
    return any(link.startswith("/proc/") for link in links)


def _opened_stream(path: Path) -> BinaryIO:
    """Return what is no file, opened for writing; a pipe without a reader is waited for, and a warning says so."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO or not path.is_fifo():
            raise
        logger.warning("%s is a pipe that nothing reads yet: waiting for its reader.", path)
        return path.open("wb")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")


def load_document(path: str | Path) -> Any:
    """Return the JSON value in a file, not yet checked beyond being JSON of a bearable size.

    Raises:
        ImportRejectedError: the file cannot be read, is too large, or holds no JSON.
    """
    try:
        return read_json(file_path(path))
    except OSError as error:
        raise ImportRejectedError(f"{path} cannot be read: {error.strerror}. Name another file.") from error
    except ValueError as error:
        raise ImportRejectedError(
            f"{path} is not JSON, as results files are: {error}. Export it again by `tune export`."
        ) from error
