"""The tables of a study of untuned shapes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.lab.untuned_file import COLUMNS, FORMAT, SCHEMA, untuned_rows
from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import markdown_table


def read_untuned_study(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it holds no study of untuned shapes of this schema.
    """
    return read_document(path, "study of untuned shapes", FORMAT, SCHEMA)


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
