"""The tables that are made of what `tune lab noise --out` and `tune lab rematch --out` keep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.lab.noise_file import (
    NOISE_COLUMNS,
    NOISE_FORMAT,
    REMATCH_COLUMNS,
    REMATCH_FORMAT,
    SCHEMA,
    noise_cells,
    noise_notes,
    rematch_cells,
)
from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import commit_sentence, markdown_table

NOISE, REMATCH = ".noise.json", ".rematch.json"
SUFFIXES = (NOISE, REMATCH)
"""How the names of such files in results/ end."""

_FORMATS = {NOISE: NOISE_FORMAT, REMATCH: REMATCH_FORMAT}

NO_NOISE = (
    "No study of the noise is here yet: `tune lab noise --out results/DEVICE.noise.json` makes it, `make results` "
    "shows it."
)
NO_REMATCH = (
    "No winners of repeated searches have met yet: `tune lab rematch --out results/DEVICE.rematch.json` lets them, "
    "`make results` shows it."
)


def block(path: Path) -> str:
    """Return the tables of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    noise = path.name.endswith(NOISE)
    if not path.exists():
        return NO_NOISE if noise else NO_REMATCH
    document = read_document(path, "results", _FORMATS[NOISE if noise else REMATCH], SCHEMA)
    return noise_table(document) if noise else rematch_table(document)


def noise_table(document: Mapping[str, Any]) -> str:
    """Return what a study found: one row a regime."""
    environment = document["environment"]
    software = ", ".join(f"{name} {environment[name]}" for name in ("triton", "torch", "driver"))
    rows = [noise_cells(name, row) for name, row in document["summary"]["regimes"].items()]
    caption = (
        f"{document['shape']['label']} on {document['device']} on {document['created_at'][:10]} ({software}, power "
        f"limit {environment['power_limit_w']} W, protocol {environment['protocol']}), {document['seconds']:.0f} s of "
        "one config and others near it, the regimes in turns; all values over the median of their own config and "
        "regime, 5th to 95th percentile:"
    )
    return "\n\n".join((caption, markdown_table(NOISE_COLUMNS, rows), *noise_notes(document), *_commit(document)))


def rematch_table(document: Mapping[str, Any]) -> str:
    """Return what became of the winners of repeated searches: one row a shape."""
    caption = (
        f"Winners of searches that began with nothing, on {document['device']} on {document['created_at'][:10]}, timed "
        "against each other and the default afterwards, in one run of finals per shape:"
    )
    table = markdown_table(REMATCH_COLUMNS, [rematch_cells(row) for row in document["rows"]])
    return "\n\n".join((caption, table, *_commit(document)))


def _commit(document: Mapping[str, Any]) -> list[str]:
    """Return the sentence that names the commit, if the file does."""
    return [sentence.strip() for sentence in (commit_sentence([document.get("commit")]),) if sentence]
