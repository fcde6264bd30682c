"""Tables of documents, in Markdown."""

from collections.abc import Collection, Iterable


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, words: Collection[int] = (0,)) -> str:
    """Return a table in Markdown.

    Args:
        columns: the names of the columns.
        rows: the cells of every row.
        words: the places of the columns that hold words; the others hold numbers, which stand to the right.
    """
    names = list(columns)
    marks = ("---" if place in words else "---:" for place in range(len(names)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, marks, *rows))


def escaped(text: str) -> str:
    """Return a text as a cell of such a table shows it. Between backticks a `<` is itself, and an entity would show."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")
