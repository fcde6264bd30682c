"""The file that tools/libraries/bench.py fills, a row at a time."""

import json
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blocktune.db.exchange.document import save_text
from blocktune.kernels.hardware.device import current_device
from blocktune.tuner.measure.environment import source_commit

FORMAT, SCHEMA = "blocktune-libraries", 1


def read(path: Path) -> dict[str, Any]:
    """Return the document of a file, or a new one."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": current_device().name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": source_commit(),
        "software": {name: version(name) for name in ("triton", "torch", "fla-core", "liger-kernel")},
        "kernels": [],
        "steps": [],
        "starts": [],
        "processes": [],
        "calls": [],
        "ranks": [],
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, all of it or nothing: a process that dies meanwhile loses no row."""
    save_text(json.dumps(document, indent=1, sort_keys=True) + "\n", path)


def note(document: dict[str, Any], path: Path, row: Mapping[str, Any]) -> None:
    """Write how a pass ended, in the place of an earlier end."""
    document["steps"] = [each for each in document["steps"] if each["step"] != row["step"]] + [row]
    write(path, document)
    sys.stdout.write(f"{row['step']}: {row['error'] or row['difference']}, {row['seconds']:.0f} s\n")
    sys.stdout.flush()


def forget_failures(path: Path) -> None:
    """Let passes that failed under an earlier command be tried again."""
    if path.exists():
        document = read(path)
        write(path, document | {"steps": [row for row in document["steps"] if not row["error"]]})


def measure_again(path: Path, steps: Collection[str]) -> None:
    """Let the kernels of passes be measured again; until they are, their rows stay, with a mark."""
    if path.exists():
        document = read(path)
        kernels = [row | ({"again": True} if row["step"] in steps else {}) for row in document["kernels"]]
        left = [row for row in document["steps"] if row["step"] not in steps]
        write(path, document | {"kernels": kernels, "steps": left})


def ended(path: Path) -> set[str]:
    """Return the passes of the file that ended, well or not."""
    return {row["step"] for row in read(path)["steps"]} if path.exists() else set()
