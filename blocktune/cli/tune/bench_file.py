"""The file that `tune bench --out` writes: rows of one device, software, regime and set of kernels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.json_files import read_document, write_atomically
from blocktune.cli.output.render import SCHEMA
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from blocktune.db.records.records import Environment, Regime
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.compare.report import Comparison

FORMAT = "blocktune-bench"

_SAME = ("schema", "format", "device", "environment", "regime", "kernels")
"""What rows must share to stand in one file."""


class BenchFile:
    """A document of comparisons, and the file that it is kept in, if any.

    A file that has rows of the same device, software, regime and kernels is added to: a shape that is measured again
    replaces its row. So a long bench may be made in several runs.

    Raises:
        UsageError: the file holds something else.
    """

    def __init__(self, path: Path | None, device: "DeviceSpec", environment: "Environment", regime: "Regime") -> None:
        from blocktune.tuner.compare.compare import bench_document
        from blocktune.tuner.measure.environment import source_commit

        self._path = path
        self._commit = source_commit()
        self.document = bench_document(device, environment, regime)
        if path is not None and path.exists():
            self._take_over(path)

    def add(self, comparison: "Comparison", command: str, now: str) -> None:
        """Put a row in and write the file; command: what was typed, now: the time as ISO 8601."""
        row = comparison.to_json() | {"commit": self._commit, "taken_at": now}
        kept = [other for other in self.document["rows"] if other["shape"] != row["shape"]]
        self.document["rows"] = [*kept, row]
        self.document["created_at"] = now
        self.document["commands"] = list(dict.fromkeys((*self.document["commands"], command)))
        if self._path is not None:
            write_atomically(self._path, json.dumps(self.document, indent=1, allow_nan=False) + "\n")

    def _take_over(self, path: Path) -> None:
        there = read_bench(path)
        differ = [name for name in _SAME if there.get(name) != self.document[name]]
        if differ:
            raise UsageError(
                f"Rows in one file must share device, software, regime and kernels, but those of {path} differ in "
                f"{', '.join(differ)}. Name another file by --out."
            )
        rows = [{"taken_at": there["created_at"]} | row for row in there["rows"]]  # older rows do not say when
        self.document |= {name: there[name] for name in ("created_at", "commands")} | {"rows": rows}


def read_bench(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it is no bench of this schema.
    """
    return read_document(path, "bench", FORMAT, SCHEMA)


def software(document: Mapping[str, Any]) -> str:
    """Return the versions of what a bench was measured with, the peers' among them."""
    environment = document["environment"]
    versions = [f"{name} {environment[name]}" for name in ("triton", "torch", "cudnn", "driver")]
    return ", ".join([*versions, *environment.get("peers", {}).values()])
