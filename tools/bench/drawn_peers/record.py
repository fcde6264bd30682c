"""The record of a run: a row for each cell, and the summary of each group."""

import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from blocktune.cli.output.json_files import write_atomically
from blocktune.kernels.hardware.nvml import driver_version
from blocktune.tuner.measure.environment import source_commit
from tools.bench.drawn_peers.draw import GROUPS
from tools.pages.searches.drawn_peer_tables import CLEARLY_SLOWER, FORMAT, SCHEMA

PACKAGES = ("torch", "triton", "fa3-fwd", "flash-attn-3", "flash-attn-4", "flash-attn3-jax", "jax")
Row = Mapping[str, Any]


class Record:
    """The document of a run, written whenever a row is added."""

    def __init__(self, path: Path, *, seed: int, drawn: int, peers: Sequence[str], missing: Mapping[str, str]) -> None:
        self._path = path
        self.document: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": source_commit(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "environment": _environment(),
            "seed": seed,
            "drawn": drawn,
            "peers": list(peers),
            "missing": dict(missing),
            "rows": [],
            "groups": {},
        }

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self.document["rows"].append(row)
        self.document["groups"] = summaries(self.document["rows"])
        write_atomically(self._path, json.dumps(self.document, indent=1) + "\n")


def _environment() -> dict[str, str]:
    """Return the versions of whatever takes part."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version() or 0
        found |= {"driver": driver_version(), "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"}
    return found


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the summary of each group that has rows, and of all rows as `all`."""
    groups = {name: [row for row in rows if row["group"] == name] for name in GROUPS}
    return {name: _summary(found) for name, found in (groups | {"all": list(rows)}).items() if found}


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return counts and means of the fastest peer's time over ours."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    counts = {"cells": len(ratios), "errors": sum("error" in row for row in rows)}
    counts |= {"without_peer": len(rows) - counts["cells"] - counts["errors"]}
    if not ratios:
        return counts
    return counts | {
        "mean": round(statistics.geometric_mean(ratios), 4),
        "least": min(ratios),
        "slower": sum(ratio < 1.0 for ratio in ratios),
        "clearly_slower": sum(ratio < CLEARLY_SLOWER for ratio in ratios),
    }
