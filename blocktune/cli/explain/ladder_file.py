"""The file that `tune ladder --out` writes, one ladder a shape."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.json_files import read_document, write_atomically
from blocktune.cli.output.render import SCHEMA
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS
from blocktune.tuner.cost.bands import stored_band_text

if TYPE_CHECKING:
    from blocktune.db.records.records import Environment
    from blocktune.kernels.hardware.device import DeviceSpec

FORMAT = "blocktune-ladder"
SUFFIX = ".ladder.json"
"""How the names of such files in results/ end."""

HEADER = ("step", "config", "time", "TFLOP/s", "over the step before", "over v2", "device memory", "occupancy",
          "limited by", "tensor cores")  # fmt: skip


_SAME = ("schema", "format", "device", "environment")
"""What ladders must share to stand in one file."""


class LadderFile:
    """A document of ladders; a file that exists is added to, a shape that is climbed again replaces its ladder.

    Raises:
        UsageError: the file holds something else, or ladders of another device or software.
    """

    def __init__(self, path: Path, device: "DeviceSpec", environment: "Environment") -> None:
        self._path = path
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "format": FORMAT,
            "device": replace(device, uuid=None).to_json(),
            "environment": asdict(environment),
            "created_at": "",
            "commands": [],
            "rows": [],
        }
        if path.exists():
            there = read_ladder(path)
            differ = [name for name in _SAME if there.get(name) != self.document[name]]
            if differ:
                raise UsageError(
                    f"Ladders in one file must share device and software, but those of {path} have another "
                    f"{', '.join(differ)}. Name another file by --out."
                )
            self.document |= {name: there[name] for name in ("created_at", "commands", "rows")}

    def add(self, row: Mapping[str, Any], command: str, now: str) -> None:
        """Put a ladder in and write the file; command: what was typed, now: the time as ISO 8601."""
        from blocktune.tuner.measure.environment import source_commit

        document = self.document
        others = [other for other in document["rows"] if other["shape"] != row["shape"]]
        document["rows"] = [*others, dict(row) | {"commit": source_commit()}]
        document["created_at"] = now
        document["commands"] = list(dict.fromkeys((*document["commands"], command)))
        write_atomically(self._path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_ladder(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it holds no ladders of this schema.
    """
    return read_document(path, "ladder", FORMAT, SCHEMA)


@dataclass(frozen=True, slots=True)
class ShippedLadder:
    """A ladder that was measured and ships with the package: the document that it is of, and its row."""

    document: Mapping[str, Any]
    row: Mapping[str, Any]

    @property
    def source(self) -> str:
        """When and with what it was measured."""
        return f"measured on {self.document['created_at'][:10]} ({software_of(self.document)}), ships with blocktune"

    @property
    def cells(self) -> list[list[str]]:
        """The rows of a table under `HEADER`."""
        flops = AttentionShape.from_json(self.row["shape"]).flops
        return [step_cells(step, flops) for step in self.row["steps"]]

    def to_json(self) -> dict[str, Any]:
        return {
            "created_at": self.document["created_at"],
            "environment": self.document["environment"],
            "rounds": self.row["rounds"],
            "steps": self.row["steps"],
        }


def shipped_ladder(device: "DeviceSpec", shape: AttentionShape) -> ShippedLadder | None:
    """Return the ladder that ships for a device and a shape, if one was measured."""
    for entry in sorted(resources.files(SHIPPED_RESULTS).iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(SUFFIX):
            continue
        with resources.as_file(entry) as path:
            document = read_ladder(path)
        for row in document["rows"] if document["device"]["name"] == device.name else ():
            if row["origin"] == "measured" and AttentionShape.from_json(row["shape"]) == shape:
                return ShippedLadder(document, row)
    return None


def software_of(document: Mapping[str, Any]) -> str:
    """Return the software with which a document was made, in words."""
    environment = document["environment"]
    names = [name for name in ("triton", "torch", "driver") if environment[name]]
    return ", ".join(f"{name} {environment[name]}" for name in names)


def step_cells(step: Mapping[str, Any], flops: int) -> list[str]:
    """Return the row of a step under `HEADER`."""
    timing = step["timing"]
    time_us = timing["median_us"] if timing else step["predicted_us"]
    band = "" if timing else f", {stored_band_text(step.get('predicted_band'))}"
    known = time_us is not None and not step["problem"]
    pytorch = "PyTorch" if timing or step["hbm_bytes"] else "-"
    return [
        step["name"],
        KernelConfig.from_json(step["config"]).label if step["config"] else pytorch,
        f"{time_us:,.0f} µs{band}" if known else "-",
        f"{1e-6 * flops / time_us:.1f}" if known else "-",
        *("-" if step[name] is None else f"{step[name]:.2f}x" for name in ("over_before", "over_v2")),
        "-" if step["hbm_bytes_least"] is None else f"{step['hbm_bytes_least'] / 1e9:,.2f} GB",
        "-" if step["occupancy"] is None else f"{100 * step['occupancy']:.4g} %",
        ", ".join(step["limiters"]).replace("_", " ") or "-",
        step["tensor_cores"] or "-",
    ]
