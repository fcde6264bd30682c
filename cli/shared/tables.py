"""A table as lines of text: in columns where the width allows it, else a card for each row."""

import io
import sys
import textwrap
from collections.abc import Sequence

Row = Sequence[str]

GAP = 3
"""Blanks between two columns."""

LEAST_WRAPPED = 16
"""Columns that a wrapped cell keeps at least; below that a card is easier to read."""


def table_lines(columns: Row, rows: Sequence[Row], width: int | None, optional: Row = ()) -> list[str]:
    """Return the lines of a table of at most `width` columns, None for no limit."""
    return fitted_table(columns, rows, width, optional)[0]


def fitted_table(
    columns: Row, rows: Sequence[Row], width: int | None, optional: Row = ()
) -> tuple[list[str], list[str]]:
    """Return the lines of a table of at most `width` columns, None for no limit, and the columns that were left out.

    Where the width is short by little, the widest column wraps its cells at words. Where that would break a word or
    leave a sliver, columns are left out, those of `optional` in that order. Where that does not help either, each row
    becomes a card, with a line for each cell that says something.
    """
    left_out: list[str] = []
    for name in ("", *optional):
        left_out += [name] if name in columns and name else []
        kept = [index for index, column in enumerate(columns) if column not in left_out]
        chosen = [[row[index] for index in kept] for row in (columns, *rows)]
        widths = _widths(chosen, width)
        if widths is not None:
            return _column_lines(chosen[0], chosen[1:], widths), left_out
    assert width is not None
    return _card_lines(columns, rows, width), []


def _widths(rows: Sequence[Row], width: int | None) -> list[int] | None:
    """Return the width of every column, the widest one narrowed to wrap at words where it must; None where that is too
    narrow."""
    widths = [max(map(_cells, column)) for column in zip(*rows, strict=True)]
    surplus = 0 if width is None else max(0, sum(widths) + GAP * (len(widths) - 1) - width)
    widest = widths.index(max(widths))
    longest_word = max((_cells(word) for row in rows for word in row[widest].split()), default=0)
    if surplus and widths[widest] - surplus < max(LEAST_WRAPPED, longest_word):
        return None
    widths[widest] -= surplus
    return widths


def _cells(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    from rich.cells import cell_len

    return cell_len(text)


def _column_lines(columns: Row, rows: Sequence[Row], widths: Sequence[int]) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(Text(name), width=width)
    for row in rows:
        table.add_row(*map(Text, row))  # taken literally: a device called `[red]` stays that
    # in memory, with the boxes that the output can show: rich would write to the output itself, even when it captures
    memory = io.TextIOWrapper(io.BytesIO(), encoding=getattr(sys.stdout, "encoding", None) or "utf-8")
    console = Console(file=memory, highlight=False, width=sum(widths) + GAP * len(widths))
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def _card_lines(columns: Row, rows: Sequence[Row], width: int) -> list[str]:
    """Return every row under its first cell, where that column needs no name, and a blank line between two rows."""
    labels = max(map(_cells, columns))
    lines: list[str] = []
    for row in rows:
        lines += [""] if lines else []
        headed = not columns[0]
        lines += [row[0]] if headed else []
        for name, cell in list(zip(columns, row, strict=True))[headed:]:
            if cell not in EMPTY:
                start = ("  " if headed else "") + name.ljust(labels) + "  "
                lines += wrapped_lines(start + cell, width, indent=len(start))
    return lines


EMPTY = ("", "-")
"""Cells that say nothing."""


def wrapped_lines(line: str, width: int, *, indent: int) -> list[str]:
    """Return a line as several of at most `width` columns, cut between words; further ones begin with `indent` blanks.
    A word that is longer than the width stays whole."""
    if _cells(line) <= width:
        return [line]
    blanks = " " * min(indent, width // 2)
    return textwrap.wrap(
        line, width, subsequent_indent=blanks, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
