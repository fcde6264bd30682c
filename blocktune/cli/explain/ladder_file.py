"""The file that `tune ladder --out` writes, one ladder a shape, and the tables that are made of it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.document_tables import markdown_table
from blocktune.cli.output.json_files import read_document, write_atomically
from blocktune.cli.output.render import SCHEMA, commit_sentence
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.store_reader.export_file import SHIPPED_RESULTS

if TYPE_CHECKING:
    from blocktune.db.records.records import Environment
    from blocktune.kernels.hardware.device import DeviceSpec

FORMAT = "blocktune-ladder"
SUFFIX = ".ladder.json"
"""How the names of such files in results/ end."""

HEADER = ("step", "config", "time", "TFLOP/s", "over the step before", "over v2", "device memory", "occupancy",
          "limited by", "tensor cores")  # fmt: skip

WORDS = ("step", "config", "limited by", "tensor cores")
"""Columns that hold words."""

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
        return f"measured on {self.document['created_at'][:10]} ({_software(self.document)}), ships with blocktune"

    @property
    def cells(self) -> list[list[str]]:
        """The rows of a table under `HEADER`."""
        flops = AttentionShape.from_json(self.row["shape"]).flops
        return [_cells(step, flops) for step in self.row["steps"]]

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


def ladder_tables(document: Mapping[str, Any]) -> str:
    """Return the tables of a document, with where they come from and why each step differs from the one before."""
    return "\n\n".join([_caption(document), *(_section(row) for row in document["rows"])])


def _caption(document: Mapping[str, Any]) -> str:
    commands = " and ".join(f"`{command}`" for command in document["commands"])
    measured = all(row["origin"] == "measured" for row in document["rows"])
    how = (
        "All steps were checked first and timed in turns in one run"
        if measured
        else "Nothing was measured: all times are predicted"
    )
    return (
        f"{'Measured' if measured else 'Predicted'} for {document['device']['name']} on {document['created_at'][:10]} "
        f"({_software(document)}), by {commands}. {how}; the bytes are counted by the model, with all keys that L2 can "
        f"keep.{commit_sentence(row.get('commit') for row in document['rows'])}"
    )


def _software(document: Mapping[str, Any]) -> str:
    environment = document["environment"]
    names = [name for name in ("triton", "torch", "driver") if environment[name]]
    return ", ".join(f"{name} {environment[name]}" for name in names)


def _section(row: Mapping[str, Any]) -> str:
    flops = AttentionShape.from_json(row["shape"]).flops
    cells = [_cells(step, flops) for step in row["steps"]]
    kept = [place for place in range(len(HEADER)) if any(line[place] != "-" for line in cells)]
    header, *lines = ([line[place] for place in kept] for line in (HEADER, *cells))
    table = markdown_table(header, lines, words=[place for place, name in enumerate(header) if name in WORDS])
    notes = [f"- {step['name']}: {_note(step)}" for step in row["steps"]]
    return f"{row['label']}:\n\n{table}\n\n" + "\n".join(notes)


def _cells(step: Mapping[str, Any], flops: int) -> list[str]:
    timing = step["timing"]
    time_us = timing["median_us"] if timing else step["predicted_us"]
    known = time_us is not None and not step["problem"]
    pytorch = "PyTorch" if timing or step["hbm_bytes"] else "-"
    return [
        step["name"],
        KernelConfig.from_json(step["config"]).label if step["config"] else pytorch,
        f"{time_us:,.0f} µs" if known else "-",
        f"{1e-6 * flops / time_us:.1f}" if known else "-",
        *("-" if step[name] is None else f"{step[name]:.2f}x" for name in ("over_before", "over_v2")),
        "-" if step["hbm_bytes_least"] is None else f"{step['hbm_bytes_least'] / 1e9:,.2f} GB",
        "-" if step["occupancy"] is None else f"{100 * step['occupancy']:.4g} %",
        ", ".join(step["limiters"]).replace("_", " ") or "-",
        step["tensor_cores"] or "-",
    ]


def _note(step: Mapping[str, Any]) -> str:
    words = f"{step['idea']}."
    words += f" By the models: {step['why']}." if step["why"] else ""
    return f"{words} Not run: {step['problem']}" if step["problem"] else words
