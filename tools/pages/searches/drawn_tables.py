"""The tables of a study of drawn shapes."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import commit_sentence, markdown_table

SUFFIX = ".drawn.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-drawn", 1

FEW_QUERIES = 16


DRAWN_COLUMNS = ("shape", "untuned", "tuned", "untuned over fastest", "seconds of the search")


NOTHING_DRAWN = (
    "No shapes were drawn yet: `python -m tools.bench.drawn_shapes SEED results/DEVICE.drawn.json` does it, "
    "`make results` shows them."
)


def drawn_block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NOTHING_DRAWN
    document = read_document(path, "study of drawn shapes", FORMAT, SCHEMA)
    caption = (
        f"{len(document['rows'])} of {document['drawn']} shapes drawn with seed {document['seed']}, on "
        f"{document['device']} on {document['created_at'][:10]}: what a call got before the shape was tuned and what "
        f"the search found, in the same rounds.{commit_sentence([document['commit']])}"
    )
    return "\n\n".join(
        (caption, markdown_table(DRAWN_COLUMNS, drawn_rows(document), words=(0,)), drawn_summary(document))
    )


def drawn_rows(document: Mapping[str, Any]) -> Iterable[list[str]]:
    """Yield the cells of every shape, the greatest loss first."""
    for row in sorted(document["rows"], key=lambda row: -row["untuned_over_fastest"]):
        times = [f"{row[which]['time_us']:,.1f} µs" for which in ("untuned", "tuned")]
        yield [row["shape"]["label"], *times, f"{row['untuned_over_fastest']:.3f}", f"{row['seconds']:.1f}"]


def drawn_summary(document: Mapping[str, Any]) -> str:
    """Return the sentences below the table: means, and whether tuning made anything slower."""
    rows = document["rows"]
    losses = sorted(row["untuned_over_fastest"] for row in rows)
    few = [row["untuned_over_fastest"] for row in rows if row["shape"]["seqlen_q"] <= FEW_QUERIES]
    decoding = f", decoding and few queries alone {geometric_mean(few):.3f} ({len(few)})" if few else ""
    slower = sum(row["tuned_is_slower"] for row in rows)
    return (
        f"Untuned over fastest: geometric mean {geometric_mean(losses):.3f}, 95th percentile "
        f"{losses[math.ceil(0.95 * len(losses)) - 1]:.3f}, worst {losses[-1]:.3f}{decoding}. Tuning made "
        f"{slower or 'none'} of them slower by more than the noise."
    )
