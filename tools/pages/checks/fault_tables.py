"""The table that is made of results/store.faults.json, which `make fault-test` writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import markdown_table

SUFFIX = ".faults.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-faults", 2

NO_FAULTS = "No record of injected faults is here yet: `make fault-test` makes it, `make results` shows it."


def block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NO_FAULTS
    document = read_document(path, "results", FORMAT, SCHEMA)
    cases = document["cases"]
    python, sqlite = (", ".join(sorted({case[name] for case in cases})) for name in ("python", "sqlite"))
    caption = (
        f"Run with Python {python} and SQLite {sqlite}, without a GPU. Lost are acknowledged rows that are gone "
        "without a word; wrong are rows that were never stored, and commands that did not end as they should:"
    )
    rows = [
        [case["name"], f"{case['tried']:,}", f"{case['lost']}", f"{case['wrong']}", _run(case), case["note"] or "-"]
        for case in cases
    ]
    columns = ("case", "tried", "lost", "wrong", "run", "note")
    return f"{caption}\n\n{markdown_table(columns, rows, words=(0, 4, 5))}"


def counts(path: Path) -> str:
    """Return a sentence with what was tried, and what was lost and wrong of all of it.

    Raises:
        UsageError: the file holds nothing of the kind that its name says.
    """
    cases = read_document(path, "results", FORMAT, SCHEMA)["cases"]
    lost, wrong = (sum(case[what] for case in cases) for what in ("lost", "wrong"))
    tried = "; ".join(f"{case['tried']:,} {case['name']}" for case in cases)
    return (
        f"The record of {max(case['date'] for case in cases)} counts {lost} lost rows and {wrong} wrong answers, "
        f"tracebacks, hangs and shown passwords: {tried}."
    )


def _run(case: Mapping[str, Any]) -> str:
    """Return when a part was run, of which commit, and with which seed."""
    commit = f", `{case['commit']}`" if case["commit"] else ""
    return f"{case['date']}{commit}, seed {case['seed']}"
