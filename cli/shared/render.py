"""How results look: JSON or tables on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer

SCHEMA = 1
"""Version of every JSON object that a command prints; it rises when a field changes its meaning or goes."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

EMPTY = ("", "-")
"""Cells that say nothing."""

PIPE_WIDTH = 200
"""Columns of a table that no terminal limits."""


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    typer.echo(json.dumps({"schema": SCHEMA} | dict(data), indent=2, allow_nan=False))


def note(message: str) -> None:
    """Print a message for the person at the terminal on stderr, out of the way of the data."""
    typer.echo(message, err=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Print a table on stdout; a column without any content is left out.

    Cells are taken literally: a device called `[red]` stays that.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[str(cell) for cell in row] for row in rows]
    kept = [index for index in range(len(columns)) if not cells or any(row[index] not in EMPTY for row in cells)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index in kept:
        table.add_column(Text(columns[index]), overflow="fold")
    for row in cells:
        table.add_row(*(Text(row[index]) for index in kept))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    with console.capture() as capture:
        console.print(table)
    typer.echo("\n".join(([title] if title else []) + [line.rstrip() for line in capture.get().splitlines()]))


def microseconds(time_us: float | None) -> str:
    """A time for people; a dash where there is none."""
    return "-" if time_us is None else f"{time_us:,.1f} µs"


def percent(fraction: float | None) -> str:
    """A fraction for people; a dash where there is none."""
    return "-" if fraction is None else f"{100 * fraction:.4g} %"


def counts(outcomes: Mapping[Any, int]) -> str:
    """Counts by outcome for people, such as `31 ok, 2 compile error`."""
    return ", ".join(f"{count} {str(name).replace('_', ' ')}" for name, count in outcomes.items() if count) or "none"
