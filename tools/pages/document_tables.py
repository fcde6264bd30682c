"""Tables of documents, in Markdown, and the sentences around them."""

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


def escape(text: str) -> str:
    """Return a text as a cell of such a table shows it. Between backticks a `<` is itself, and an entity would show."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


COMMIT_CHARACTERS = 10
"""How much of a commit a table names."""


def commit_sentence(commits: Iterable[str | None]) -> str:
    """Return a sentence that names each commit once, with a space before it.

    Args:
        commits: those of a record's parts; empty or None where a part does not say.

    Returns:
        The sentence; empty where no part names its commit.
    """
    named = short_commits(commits)
    return f" Commit {' and '.join(named)}." if named else ""


def short_commits(commits: Iterable[str | None]) -> list[str]:
    """Return the beginnings of commits, each once, with the `+` of sources that were changed."""
    shortened = (commit[:COMMIT_CHARACTERS] + commit[len(commit.rstrip("+")) :] for commit in commits if commit)
    return list(dict.fromkeys(shortened))
