"""Text for people: counts of things, and a small table for notebooks."""

from collections.abc import Collection, Mapping
from html import escape


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Return a count of things: `1 winner`, `1,200 winners`; `nouns` is the plural where that takes more than an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"


def html_table(title: str, rows: Mapping[str, str], *, bold: Collection[str] = ()) -> str:
    """Return a table of two columns in HTML.

    Args:
        title: what stands above it.
        rows: the second cell of each row, by the first.
        bold: first cells of the rows that stand out.
    """
    lines = "".join(_row(name, value, "th" if name in bold else "td") for name, value in rows.items())
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"


def _row(name: str, value: str, cell: str) -> str:
    left = 'style="text-align: left"'
    return f"<tr><{cell} {left}>{escape(name)}</{cell}><{cell} {left}>{escape(value)}</{cell}></tr>"
