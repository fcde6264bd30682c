"""A table as lines of text: in columns where the width allows it, else a card for each row."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

Row = Sequence[str]

GAP = 3
"""Blanks between two columns."""

COMBINING = "\u0300"
"""The first sign that may take another width than one column; those in front of it are Latin letters and the like."""

LEAST_WRAPPED = 16
"""Columns that a wrapped cell keeps at least; below that a card is easier to read."""


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
    if not surplus:
        return widths
    longest_word = max((_cells(word) for row in rows for word in row[widest].split()), default=0)
    if widths[widest] - surplus < max(LEAST_WRAPPED, longest_word):
        return None
    widths[widest] -= surplus
    return widths


def _cells(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    if text.isprintable() and (text.isascii() or max(text) < COMBINING):
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _column_lines(columns: Row, rows: Sequence[Row], widths: Sequence[int]) -> list[str]:
    """Return the head, a rule, and the rows: tens of thousands in a moment."""
    rule = _shown_sign("─", "-") * (sum(widths) + GAP * (len(widths) - 1))
    body = (line for row in rows for line in _row_lines(row, widths))
    return [*_row_lines(columns, widths), rule, *body]


def _shown_sign(sign: str, plain: str) -> str:
    """Return a sign that the output can show."""
    try:
        sign.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return plain
    return sign


def _row_lines(cells: Row, widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of one row: several where a cell is wrapped at words."""
    blanks = [width - _cells(cell) for cell, width in zip(cells, widths, strict=True)]
    if min(blanks) >= 0:
        yield (" " * GAP).join(cell + " " * count for cell, count in zip(cells, blanks, strict=True)).rstrip()
        return
    wrapped = [wrapped_lines(cell, width, indent=0) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*wrapped, fillvalue=""):
        padded = (part + " " * (width - _cells(part)) for part, width in zip(parts, widths, strict=True))
        yield (" " * GAP).join(padded).rstrip()


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
