"""How results look: JSON or tables on stdout, everything else on stderr."""

import itertools
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

from blocktune.cli.output.tables import EMPTY, fitted_table, wrapped_lines
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

SCHEMA = 1
"""Version of every JSON object that a command prints; it rises when a field changes its meaning or goes."""

MAX_TEXT = 200_000
"""Characters of a result in words."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    _write(json.dumps({"schema": SCHEMA} | dict(data), indent=2, allow_nan=False), sys.stdout)


def print_content(text: str) -> None:
    """Print what would be the content of a file on stdout, as it is."""
    _write(text, sys.stdout, ends_line=False)


def note(message: str) -> None:
    """Print a message for the person at the terminal on stderr, out of the way of the data."""
    _write(_wrap_text(shown(message), sys.stderr), sys.stderr)


def say(text: str) -> None:
    """Print a result in words on stdout."""
    _write(_wrap_text(shown(text, MAX_TEXT), sys.stdout), sys.stdout)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", optional: Sequence[str] = ()
) -> None:
    """Print a table on stdout; a column without any content is left out.

    On a terminal it keeps to the width: the columns `optional` may be left out for that, the first one first, and a
    message says which were.
    """
    cells = [[shown(str(cell)) for cell in row] for row in rows]
    kept = [index for index in range(len(columns)) if not cells or any(row[index] not in EMPTY for row in cells)]
    if title:
        say(title)
    head, *body = ([row[index] for index in kept] for row in (columns, *cells))
    lines, left_out = fitted_table(head, body, _width(sys.stdout), optional)
    _write("\n".join(lines), sys.stdout)
    if left_out:
        note(f"left out, since the terminal is narrow: {', '.join(left_out)}; --json has everything")


def print_styled(lines: "Iterable[Text]") -> None:
    """Print lines on stdout, in colours where that is a terminal. Their text went through `shown` before."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True)
    _write(capture.get().rstrip("\n"), sys.stdout)


def terminal_width(usual: int = 80) -> int:
    """Return the columns of the terminal that shows stdout; `usual` where no terminal limits it."""
    return _width(sys.stdout) or usual


def _write(text: str, stream: TextIO | None, *, ends_line: bool = True) -> None:
    """Print a text on one of the two streams, unless it is closed.

    Raises:
        UsageError: the standard output cannot be written, as on a full disk.
    """
    if stream is None:
        return
    try:
        typer.echo(text, file=stream, nl=ends_line)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is still buffered goes nowhere
        if stream is sys.stdout:
            raise UsageError(f"The output cannot be written: {error.strerror}. Send it to another place.") from error


def _wrap_text(text: str, stream: TextIO | None) -> str:
    """Return the text with its lines cut between words where the stream is a terminal that would cut them anywhere."""
    width = _width(stream)
    if width is None:
        return text
    lines = (wrapped_lines(line, width, indent=len(line) - len(line.lstrip())) for line in text.split("\n"))
    return "\n".join(itertools.chain.from_iterable(lines))


def _width(stream: TextIO | None) -> int | None:
    """Return the columns of the terminal that shows the stream; None where no terminal limits it."""
    if stream is None or not stream.isatty():
        return None
    named = os.environ.get("COLUMNS", "")
    try:
        return int(named) if named.isdecimal() and int(named) else os.get_terminal_size(stream.fileno()).columns or None
    except OSError:  # a terminal that does not tell
        return None


def microseconds(time_us: float | None) -> str:
    """Return a time for people; a dash where there is none."""
    return "-" if time_us is None else f"{time_us:,.1f} µs"


def millijoules(energy_mj: float | None) -> str:
    """Return an energy for people; a dash where there is none."""
    return "-" if energy_mj is None else f"{energy_mj:,.1f} mJ"


def percent(fraction: float | None) -> str:
    """Return a fraction for people; a dash where there is none."""
    return "-" if fraction is None else f"{100 * fraction:.4g} %"


def counts(outcomes: Mapping[Any, int]) -> str:
    """Return the counts by outcome for people, such as `31 ok, 2 compile error`."""
    return ", ".join(f"{count} {str(name).replace('_', ' ')}" for name, count in outcomes.items() if count) or "none"
