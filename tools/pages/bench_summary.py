"""A bench in six rows, for a page that has no room for all: short, middle and long causal sequences."""

from collections.abc import Mapping
from typing import Any

from blocktune.cli.tune.bench_file import software
from blocktune.kernels.values.shape import Causal
from blocktune.tuner.compare.report import PEERS
from tools.pages.bench_tables import BEST, GUESTS, NOTHING, REGIMES, BenchRow, absent, means
from tools.pages.document_tables import markdown_table

PART = "summary"
"""The name by which a page asks for it: `<!-- results FILE#summary -->`."""

LENGTHS = (1024, 4096, 16384)
RIVALS = {BEST: "the fastest rival", **PEERS}
SHORT = GUESTS | {"fa2": "FA2"}


def summary(document: Mapping[str, Any] | None) -> str:
    """Return the rows of LENGTHS with a causal mask, and the means over all rows; None: there is no such file."""
    if document is None or not document["rows"]:
        return NOTHING
    rows = [BenchRow(row) for row in document["rows"]]
    shown = [row for row in rows if row.shape.seqlen_q in LENGTHS and row.shape.causal is Causal.UPPER_LEFT]
    peers = [name for name in PEERS if any(row.timing(name) for row in shown)]
    header = (
        "head_dim",
        "seqlen",
        *(SHORT.get(name, PEERS[name]) for name in peers),
        "blocktune",
        "over fastest rival",
    )
    ordered = sorted(shown, key=lambda row: (row.shape.head_dim, row.place()))
    table = markdown_table(header, (_cells(row, peers) for row in ordered), words=())
    return "\n\n".join((_caption(document, rows[0]), table, means(rows, RIVALS)))


def _caption(document: Mapping[str, Any], row: BenchRow) -> str:
    return (
        f"{absent(document)}{document['device']['name']}, {document['created_at'][:10]} ({software(document)}), "
        f"{row.shape.dtype}, causal, {REGIMES[document['regime']]}. "
        "TFLOP/s; the last column is the speedup over the fastest rival, with its 5th and 95th percentile:"
    )


def _cells(row: BenchRow, peers: list[str]) -> list[str]:
    return [
        str(row.shape.head_dim),
        str(row.shape.seqlen_q),
        *(row.rate(name) for name in (*peers, row.own)),
        row.over_best,
    ]
