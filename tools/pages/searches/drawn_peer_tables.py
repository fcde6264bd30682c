"""The table of shapes that were drawn and timed next to every peer."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from blocktune.cli.output.missing_peers import sentence_without
from blocktune.tuner.compare.report import PEERS
from tools.pages.document_tables import commit_sentence, markdown_table

SUFFIX = ".drawn-peers.table.json"
FORMAT, SCHEMA = "blocktune-drawn-peers", 1

CLEARLY_SLOWER = 0.97
"""What a cell must reach to be left out of the list below the table."""

COLUMNS = ("group", "shapes", "mean", "least", "slower", f"below {CLEARLY_SLOWER}")
NOTHING = "No shapes were drawn next to other implementations yet: `python -m tools.bench.drawn_peers` does it."


def block(path: Path) -> str:
    """Return the table of the groups of a file, and below it every shape that is clearly slower.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NOTHING
    document = read_document(path, "record of drawn shapes", FORMAT, SCHEMA)
    rows = document["rows"]
    timed = {name for row in rows for name in row.get("ratios", ())}
    software = ", ".join(f"{name} {version}" for name, version in sorted(document["environment"].items()))
    drawn = f"{len(rows)} shapes drawn with seed {document['seed']}, untuned"
    caption = (
        f"{sentence_without(timed)}{document['device']}, {document['created_at'][:10]} ({software}): {drawn}, "
        f"the time of the fastest of {_enumerate_peers(timed)} over "
        f"ours.{commit_sentence([document['commit']])}"
    )
    return "\n\n".join((caption, markdown_table(COLUMNS, _group_rows(document["groups"])), _slower_sentence(rows)))


def _enumerate_peers(timed: Iterable[str]) -> str:
    """Return peers by their titles."""
    return ", ".join(title for name, title in PEERS.items() if name in set(timed))


def _group_rows(groups: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of each group, and of all of them at the end."""
    for name, found in groups.items():
        if found["cells"]:
            counts = (str(found[key]) for key in ("slower", "clearly_slower"))
            yield [name, str(found["cells"]), f"{found['mean']:.3f}", f"{found['least']:.3f}", *counts]


def _slower_sentence(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return every shape that is clearly slower than a peer, the slowest first, and what has no time."""
    rows = list(rows)
    found = sorted((row["ratio"], row["label"], row["fastest"]) for row in rows if _is_slower(row))
    words = "; ".join(f"{label} {ratio:.2f} ({PEERS[peer]})" for ratio, label, peer in found) or "none"
    failed = sum("error" in row for row in rows)
    return f"Below {CLEARLY_SLOWER}: {words}." + (f" {failed} more could not be timed." if failed else "")


def _is_slower(row: Mapping[str, Any]) -> bool:
    return "ratio" in row and row["ratio"] < CLEARLY_SLOWER
