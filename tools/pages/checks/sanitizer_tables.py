"""The table that is made of results/DEVICE.sanitizer.json, which `make sanitize` writes: what compute-sanitizer found.

The program that writes it takes the names from here, and has PyTorch and Triton alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import commit_sentence

SUFFIX = ".sanitizer.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-sanitizer", 1
NO_TOOL = "none"
"""The tool of a row whose cases ran alone."""

NOT_RUN = (
    "No kernel was run under compute-sanitizer yet: `make sanitize RECORD=results/DEVICE` does it on a GPU, "
    "`make results` shows it."
)


def block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NOT_RUN
    document = read_document(path, "sanitizer record", FORMAT, SCHEMA)
    rows = {(row["kernel"], row["tool"]): row for row in document["rows"]}
    tools = sorted({tool for _, tool in rows} - {NO_TOOL})
    lines = [_line(["kernel", "cases", *tools]), _line(["---", *["---:"] * (1 + len(tools))])]
    for kernel in sorted({kernel for kernel, _ in rows}):
        cells = [_finding(rows.get((kernel, tool))) for tool in tools]
        lines.append(_line([f"`{kernel}`", str(len(_cases(rows, kernel))), *cells]))
    return f"{_caption(document)}\n\n" + "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _caption(document: Mapping[str, Any]) -> str:
    environment = document["environment"]
    software = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "driver") if environment[name])
    commit = commit_sentence(row.get("commit") for row in document["rows"])
    return (
        f"{document['tool_version']} of compute-sanitizer on {document['device']}, {document['created_at'][:10]} "
        f"({software}). Errors that it counted, and `-` where a tool was not run.{commit}"
    )


def _cases(rows: Mapping[tuple[str, str], Mapping[str, Any]], kernel: str) -> Sequence[Any]:
    return max((row["cases"] for (name, _), row in rows.items() if name == kernel), key=len)


def _finding(row: Mapping[str, Any] | None) -> str:
    """Return what a tool counted, or how its process ended where it gave no count."""
    if row is None:
        return "-"
    return f"exit {row['exit']}" if row["exit"] != 0 or row["errors"] is None else str(row["errors"])
