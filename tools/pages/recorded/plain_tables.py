"""Tables of measurements that are one table: results/DEVICE.NAME.table.json, which says how they were taken."""

from pathlib import Path

from blocktune.cli.output.json_files import read_document
from blocktune.cli.output.missing_peers import peers_in, sentence_without
from tools.pages.document_tables import commit_sentence, markdown_table

SUFFIX = ".table.json"
FORMAT, SCHEMA = "blocktune-table", 1


def block(path: Path) -> str:
    """Return the table of a file under a sentence that says how it came about.

    Raises:
        UsageError: it holds no such table.
    """
    if not path.exists():
        return "This was not measured yet."
    document = read_document(path, "table", FORMAT, SCHEMA)
    software = ", ".join(f"{name} {version}" for name, version in sorted(document["environment"].items()))
    cells = (str(cell) for row in document["rows"] for cell in row)
    peers = peers_in((*document["columns"], *cells))
    caption = (
        f"{sentence_without(peers) if peers else ''}{document['device']}, {document['created_at'][:10]} "
        f"({software}): {document['how']}{commit_sentence([document['commit']])}"
    )
    return f"{caption}\n\n{markdown_table(document['columns'], document['rows'])}"
