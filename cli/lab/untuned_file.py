"""What `tune replay --untuned --out` keeps, and the tables that are made of it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.shared.document_tables import markdown_table
from blocktune.cli.shared.json_files import read_document

if TYPE_CHECKING:
    from blocktune.tuner.lab.untuned import Case

SUFFIX = ".untuned.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-untuned", 1

RULES = {"expected": "the one decision", "nearest": "the nearest winner", "default": "the default alone"}
HIDDEN = {"shape": "the shape", "family": "its family"}
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
