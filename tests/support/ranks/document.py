"""The file that tools/ranks/bench.py fills, a row at a time, and the tables that are made of it."""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from blocktune.db.exchange.document import save_text
from blocktune.kernels.hardware.nvml import driver_version
from blocktune.tuner.measure.environment import source_commit

FORMAT, SCHEMA = "blocktune-parallel", 1
SAME = ("kind", "name", "case", "ranks", "length", "direction", "window", "schedule")
"""What tells rows apart: a row that is measured again takes the place of the earlier one."""

Row = Mapping[str, Any]


def new_document(device: torch.device) -> dict[str, Any]:
    """Return a document without rows."""
    on_gpu = device.type == "cuda"
    software = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    if on_gpu:
        software |= {"driver": driver_version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "environment": software,
        "rows": [],
    }


def read(path: Path, device: torch.device) -> dict[str, Any]:
    """Return the document of a file, or a new one."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else new_document(device)
    return found


def note(document: dict[str, Any], path: Path | None, row: Row) -> None:
    """Add a row in the place of an earlier one of the same, and write all of it or nothing."""
    key = _key(row)
    document["rows"] = [one for one in document["rows"] if _key(one) != key] + [row]
    if path is not None:
        save_text(json.dumps(document, indent=1, sort_keys=True) + "\n", path)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in SAME)


def measured(document: Row, kind: str, **values: Any) -> list[Row]:
    """Return the rows of a kind with these values that have a time."""
    rows = [row for row in document["rows"] if row["kind"] == kind and "ms" in row]
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def table(document: Row, how: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a document of one table, as tools/pages/recorded/plain_tables.py reads it."""
    kept = {name: document[name] for name in ("device", "created_at", "commit", "environment")}
    return {"format": "blocktune-table", "schema": 1, "how": how, "columns": columns, "rows": rows, **kept}
