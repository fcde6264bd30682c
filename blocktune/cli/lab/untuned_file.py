"""What `tune lab replay --untuned --out` and `python -m tools.bench.drawn_shapes` keep, and the tables that are
made of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.document_tables import markdown_table
from blocktune.cli.output.json_files import read_document
from blocktune.cli.output.render import commit_sentence

if TYPE_CHECKING:
    from blocktune.tuner.lab.untuned import Case

SUFFIX, DRAWN = ".untuned.json", ".drawn.json"
"""How the names of such files in results/ end."""

FORMAT, DRAWN_FORMAT, SCHEMA = "blocktune-untuned", "blocktune-drawn", 1

RULES = {"expected": "the one decision", "nearest": "the nearest winner", "default": "the default alone"}
HIDDEN = {"shape": "the shape", "family": "its family"}
FEW_QUERIES = 16
DRAWN_COLUMNS = ("shape", "untuned", "tuned", "untuned over fastest", "seconds of the search")
NOTHING_DRAWN = (
    "No shapes were drawn yet: `python -m tools.bench.drawn_shapes SEED results/DEVICE.drawn.json` does it, "
    "`make results` shows them."
)
COLUMNS = ("what is taken", "left out", "shapes", "mean", "95th percentile", "worst", "decoding")


def untuned_document(device: str, cases: "Mapping[str, Sequence[Case]]") -> dict[str, Any]:
    """Return the document of a study: by what was left out, every rule's summary and every shape."""
    from blocktune.tuner.lab.untuned import summary

    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "device": device,
        "left_out": {
            hidden: {
                "rules": {rule: summary(found, rule) for rule in RULES},
                "cases": [case.to_json() for case in found],
            }
            for hidden, found in cases.items()
        },
    }


def read_untuned(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it holds no study of untuned shapes of this schema.
    """
    return read_document(path, "study of untuned shapes", FORMAT, SCHEMA)


def untuned_rows(document: Mapping[str, Any]) -> Iterable[list[str]]:
    """Yield the cells of a row for every rule and for what was left out."""
    for hidden in HIDDEN:
        for rule in RULES:
            row = document["left_out"][hidden]["rules"][rule]
            numbers = [f"{row[name]:.3f}" for name in ("mean", "p95", "worst")]
            decoding = f"{row['decoding']:.3f} ({row['decoding_shapes']})" if row["decoding_shapes"] else "-"
            yield [RULES[rule], HIDDEN[hidden], str(row["shapes"]), *numbers, decoding]


def untuned_tables(document: Mapping[str, Any]) -> str:
    """Return the table of a study and the shapes on which the decision loses most."""
    cases = sorted(document["left_out"]["shape"]["cases"], key=lambda case: -case["expected"])
    worst = "; ".join(f"{case['shape']['label']} {case['expected']:.3f}" for case in cases[:5])
    skipped = sum(case["passed_over"] > 0 for case in cases)
    caption = (
        "Time of the config that an untuned shape gets over the best of its recorded sweep: geometric mean, 95th "
        "percentile and worst; `decoding` is the mean of shapes with at most 16 queries (how many in brackets). What "
        "is left out is unknown to the decision, and so it is to the constants of the decision, which are fitted to "
        "the others."
    )
    told = f"The decision loses most on: {worst}. On {skipped} shapes its first choice has values that the sweep does "
    told += (
        "not hold; the first one that it holds counts. Kernels that a sweep lacks, as later ones, are no choice there."
    )
    return "\n\n".join((caption, markdown_table(COLUMNS, untuned_rows(document), words=(0, 1)), told))


def drawn_block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NOTHING_DRAWN
    document = read_document(path, "study of drawn shapes", DRAWN_FORMAT, SCHEMA)
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
