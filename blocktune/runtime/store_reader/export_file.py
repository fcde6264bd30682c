"""Results files as production reads them: what `tune export` and `tune freeze` write; db/exchange/document.py has the
format.

A file is data of unknown quality. What is read here is JSON of a bearable size, a frozen file with its seal unbroken;
its rows pass the rules of `sources.py` before anything else sees them.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from blocktune import results
from blocktune.kernels.files.checksums import CHECKSUM, DEVICE_CHECKSUM, checksum_of
from blocktune.kernels.files.file_path import file_path
from blocktune.kernels.files.json_pieces import canonical_pieces, canonical_text, loads_in_pieces
from blocktune.kernels.files.reading import SERVED_BYTES, read_resource, read_trusted
from blocktune.kernels.files.signature import SIGNATURE, require_signature
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import StoreError

logger = logging.getLogger("blocktune")

Row = dict[str, Any]

SUFFIX = ".json"
"""How the names of results files end. No store has such a name, so that BLOCKTUNE_DB may name either."""

SHIPPED_RESULTS = results.__name__

RESULTS_FORMAT = ("blocktune-results", 1)
"""The `format` and `schema` of an exported document."""

_ENVIRONMENT = ("triton", "ptxas", "driver", "power_limit_w")
_SEAL = "sha256"

EXPORTED_ONLY = "trials"
"""What every export says of a winner, and no frozen file."""


def rows_in_file(path: str | Path, *, signed_by: Path | None = None) -> list[Row]:
    """Return the winners of attention kernels in a results file as rows like those of the store's `dispatch` view.

    Args:
        path: of the file.
        signed_by: a public key; only a file that its owner signed is taken.

    Raises:
        StoreError: the file cannot be read, is no results file, was changed after it was frozen, or is not signed.
        UsageError: the key cannot be read, or `cryptography` is not installed.
    """
    return _rows(str(path), _document(path, signed_by), autotuned=False)


def autotuned_rows_in_file(path: str | Path, *, signed_by: Path | None = None) -> list[Row]:
    """Return the winners of autotuned kernels in a results file as rows like those of the store's `user_dispatch` view:
    arguments and errors as of `rows_in_file`."""
    return _rows(str(path), _document(path, signed_by), autotuned=True)


def shipped_rows() -> Iterator[tuple[str, list[Row]]]:
    """Return the rows of every results file that ships with the package, by the file's name: `h200.json`, while benches
    and other documents of a device have a longer ending."""
    for entry in sorted(resources.files(SHIPPED_RESULTS).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(SUFFIX) and entry.name.count(".") == 1:
            yield entry.name, _rows(entry.name, _parse_document(entry.name, read_resource(entry)), autotuned=False)


def seal_of(document: Mapping[str, Any]) -> str:
    """Return the hash of a frozen document: SHA-256 of its canonical text without the hash and the signature."""
    digest = hashlib.sha256()
    for piece in canonical_pieces({name: value for name, value in document.items() if name not in (_SEAL, SIGNATURE)}):
        digest.update(piece.encode())
    return digest.hexdigest()


def _document(path: str | Path, signed_by: Path | None) -> dict[str, Any]:
    """Return the document in a results file, whose seal is unbroken; signed by the owner of a key, if one is given."""
    name = str(path)
    document = _parse_document(name, _text(file_path(path)))
    if signed_by is not None:
        require_signature(name, document, document.get(_SEAL) or "", signed_by)
    return document


def _text(path: Path) -> str:
    try:
        return read_trusted(path, SERVED_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"The results file {path} cannot be read: {reason}. Write it with `tune freeze`, without trials."
        ) from error


def _parse_document(name: str, text: str) -> dict[str, Any]:
    """Return the document of results in a text.

    Raises:
        StoreError: it is none, or is not as it was frozen.
    """
    try:
        document = loads_in_pieces(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{name} is not JSON, as results files are: {error}. Export it again.") from error
    if not isinstance(document, dict) or (document.get("format"), document.get("schema")) != RESULTS_FORMAT:
        way_out = _WITHOUT_SEAL if isinstance(document, dict) and "kernels" in document else "Export it again."
        raise StoreError(
            f"{name} is not a file of exported results, which have format and schema {RESULTS_FORMAT}. {way_out}"
        )
    _require_unbroken_seal(name, document)
    return document


_WITHOUT_SEAL = (
    "An older `tune kernels --freeze` wrote winners of autotuned kernels without a hash of the content. Freeze them "
    "again by `tune freeze`."
)


def _attention_values(best: Mapping[str, Any]) -> Row:
    return {field: best[field] for field in ("shape", "config", "kernel_hash", "origin", "time_us")}


def _autotuned_values(best: Mapping[str, Any]) -> Row:
    return {
        "kernel": best["shape"]["kernel"],
        "source_hash": best["kernel_hash"],
        "problem": canonical_text(best["shape"]["problem"]),
        "config": canonical_text(best["config"]["parameters"]),
        "time_us": best["time_us"],
    }


def _rows(name: str, document: Mapping[str, Any], *, autotuned: bool) -> list[Row]:
    """Return the rows of one kind of kernel: a winner's own values, its device and its software."""
    values_of = _autotuned_values if autotuned else _attention_values
    try:
        device_key = DeviceSpec.from_json(document["device"]).key
        _require_same_device(name, document)
        environments = document["environments"]
        return [
            {"device_key": device_key}
            | {field: environments[best["environment"]][field] for field in _ENVIRONMENT}
            | values_of(best)
            for best in _unchanged_winners(name, document["bests"], device_key, environments)
            if is_launch_problem(best["shape"]) is autotuned
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise StoreError(f"{name} lacks what exported results have ({reason:.300}). Export it again.") from error


def is_launch_problem(shape: Any) -> bool:
    """Return whether the `shape` of a row is of an autotuned kernel: its name and the key of a call."""
    return isinstance(shape, dict) and "problem" in shape


def exported_checksum(row: Mapping[str, Any], device_key: str, environment: Mapping[str, Any]) -> str:
    """Return the checksum of a row of an export: of all of its fields, its device and its software."""
    told = {field: value for field, value in row.items() if field != CHECKSUM}
    return checksum_of(told | {"device": device_key, "environment": dict(environment)})


def _unchanged_winners(
    name: str, bests: list[dict[str, Any]], device_key: str, environments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the winners that are as they were written, or have no checksum. The others are named in the log."""
    kept = []
    for index, best in enumerate(bests):
        checksum = best.get(CHECKSUM)
        if checksum is None or checksum == exported_checksum(best, device_key, environments[best["environment"]]):
            kept.append(best)
        else:
            logger.warning(
                "`bests[%d]` of %s is not as it was written and is left out. Export it again; a row that was changed "
                "on purpose has no `checksum`.",
                index,
                name,
            )
    return kept


def _require_same_device(name: str, document: Mapping[str, Any]) -> None:
    """Check that the device is as it was written, or has no checksum.

    Raises:
        StoreError: it was changed.
    """
    checksum = document.get(DEVICE_CHECKSUM)
    if checksum is not None and checksum != checksum_of(document["device"]):
        raise StoreError(
            f"{name} is not as it was written: `{DEVICE_CHECKSUM}` is not the checksum of `device`. Export it again; a "
            f"file whose device was changed on purpose has no `{DEVICE_CHECKSUM}`."
        )


def _require_export(name: str, document: Mapping[str, Any]) -> None:
    """Check that a document without a seal is an export, which people may edit, and no frozen file that lost it.

    Raises:
        StoreError: its winners lack what every export says of them.
    """
    bests = document.get("bests")
    if isinstance(bests, list) and any(isinstance(best, dict) and EXPORTED_ONLY not in best for best in bests):
        raise StoreError(
            f"{name} is not a frozen file: it has neither the hash of its content nor the `{EXPORTED_ONLY}` of an "
            "export. Freeze it again."
        )


def _require_unbroken_seal(name: str, document: Mapping[str, Any]) -> None:
    if _SEAL not in document:
        _require_export(name, document)
        return
    try:
        unbroken = seal_of(document) == document[_SEAL]
    except (ValueError, TypeError, RecursionError):
        unbroken = False  # NaN, say, which no frozen file holds
    if not unbroken:
        raise StoreError(
            f"{name} was changed after it was frozen: its content does not match its hash. Freeze it again."
        )
