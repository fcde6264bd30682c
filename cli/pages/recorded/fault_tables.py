"""The table that is made of results/store.faults.json, which `make fault-test` writes."""

from pathlib import Path

from blocktune.cli.shared.document_tables import markdown_table
from blocktune.cli.shared.json_files import read_document

SUFFIX = ".faults.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-faults", 1

NO_FAULTS = "No record of injected faults is here yet: `make fault-test` makes it, `make results` shows it."


def block(path: Path) -> str:
    """Return the table of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NO_FAULTS
    document = read_document(path, "results", FORMAT, SCHEMA)
    caption = (
        f"Run on {document['date']} with Python {document['python']}, SQLite {document['sqlite']} and seed "
        f"{document['seed']}, without a GPU. Lost are acknowledged rows that are gone without a word; wrong are rows "
        "that were never stored, and commands that did not end as they should:"
    )
    rows = [
        [case["name"], f"{case['tried']:,}", f"{case['lost']}", f"{case['wrong']}", case["note"] or "-"]
        for case in document["cases"]
    ]
    return f"{caption}\n\n{markdown_table(('case', 'tried', 'lost', 'wrong', 'note'), rows, words=(0, 4))}"
