"""The table that is made of results/cpu.ui.json: what a reader of the report and of the live page waits for."""

from pathlib import Path

from blocktune.cli.output.json_files import read_document

SUFFIX = ".ui.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-ui", 1

NO_BARS = "Nothing was measured yet: `python -m tools.bench.ui_bars` does it, `make results` shows it."


def block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NO_BARS
    document = read_document(path, "results", FORMAT, SCHEMA)
    caption = (
        f"Measured on {document['date']} with {document['cores']} CPU cores at a load average of "
        f"{document['load_average']:.1f}, other programs included, and Python "
        f"{document['python']}. Processor time is that of the server and its compiles:"
    )
    rows = [
        f"| {row['name']} | {row['bar']} | {row['value']:.3g} {row['unit']} | {_seconds(row['cpu_s'])} |"
        for row in document["rows"]
    ]
    return "\n".join((caption, "", "| | at most | measured | processor time |", "| --- | ---: | ---: | ---: |", *rows))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"
