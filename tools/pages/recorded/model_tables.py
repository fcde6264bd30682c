"""The table that is made of results/DEVICE.models.json, which `make model-bench` writes: steps of whole models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from blocktune.tuner.compare.report import PEERS
from tools.pages.document_tables import commit_sentence, markdown_table

SUFFIX = ".models.json"
FORMAT, SCHEMA = "blocktune-models", 1
OURS = "blocktune"

NO_MODELS = (
    "Whole models were not timed yet: `make model-bench RECORD=results/DEVICE` times them on a GPU, `make results` "
    "shows them."
)
COLUMNS = {OURS: OURS, "sdpa": "PyTorch's choice", "cudnn": PEERS["cudnn"]}
"""Whose attention a step is timed with, by its name in the file."""


def block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NO_MODELS
    document = read_document(path, "results", FORMAT, SCHEMA)
    rivals = [name for name in COLUMNS if name != OURS]
    header = ["model", "steps", *(f"{words}, µs" for words in COLUMNS.values())]
    header += [f"over {COLUMNS[name]}" for name in rivals]
    table = markdown_table(header, (_cells(row, rivals) for row in document["rows"]), words=(0, 1))
    refused = [f"{COLUMNS[name]} in {_title(row)}: {why}" for row in document["rows"] for name, why in _refusals(row)]
    parts = [_caption(document), table]
    return "\n\n".join([*parts, f"Not timed: {'; '.join(refused)}."] if refused else parts)


def _caption(document: Mapping[str, Any]) -> str:
    environment = document["environment"]
    software = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "driver"))
    return (
        f"{document['device']}, {document['created_at'][:10]} ({software}): microseconds of a step, the median of "
        f"{document['rounds']} rounds of {document['steps']} steps in turns, and the ratio in a round with its "
        f"quartiles. Results were compared first.{commit_sentence([document.get('commit')])}"
    )


def _cells(row: Mapping[str, Any], rivals: list[str]) -> list[str]:
    times, ratios = row["step_us"], row["ratios"]
    cells = [row["model"], row["mode"]]
    cells += [f"{times[name]['median']:,.0f}" if name in times else "-" for name in COLUMNS]
    return cells + [_ratio(ratios[name]) if name in ratios else "-" for name in rivals]


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})"


def _refusals(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted(row["refused"].items())


def _title(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['mode']}"
