"""The file that a differential check writes (`make fuzz OUT=results/DEVICE.differential.json`), and the tables that
are made of it: how many cases ran, on what, which kernels served them, and every case that failed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import commit_sentence, escape, markdown_table

SUFFIX = ".differential.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-differential", 1

NOT_RUN = (
    "No differential check is here yet: `make fuzz OUT=results/DEVICE.differential.json` makes one, `make results` "
    "shows it."
)
GROUPS = {"entry": "function", "dtype": "data type", "mode": "circumstances", "values": "values", "kernel": "kernel"}
"""By what cases are counted, and the heading of the column."""

BOUNDS = (0.5, 0.9, 0.99)
"""Shares of the cases whose largest error is said in parts of the bound."""

FAILURES_SHOWN = 20
"""Kinds of failures, the most frequent first."""


def block(path: Path) -> str:
    """Return the tables of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    return tables(read_differential(path)) if path.exists() else NOT_RUN


def read_differential(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it is no differential check.
    """
    return read_document(path, "differential check", FORMAT, SCHEMA)


def tables(document: Mapping[str, Any]) -> str:
    """Return what ran where, counts by function, type, circumstances, values and kernel, and what failed."""
    parts = [_summary(document), _errors(document)]
    parts += [_counts(heading, document["by"][name]) for name, heading in GROUPS.items()]
    if document["failures"]:
        parts.append("Failed:\n\n" + "\n".join(_failures(document.get("kinds", {}))))
    if document["failed_launches"]:
        rows = document["failed_launches"].values()
        lines = [f"- {row['count']}: {_in_a_line(row['message'])}" for row in rows]
        parts.append("Configs that did not launch, so that the next one was taken:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _summary(document: Mapping[str, Any]) -> str:
    software = ", ".join(f"{name} {version}" for name, version in sorted(document["environment"].items()) if version)
    verdicts, runs = document["verdicts"], document["runs"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    counted = "; ".join(f"{_VERDICTS[name]} {verdicts[name]}" for name in _VERDICTS if verdicts.get(name))
    dims, dims_v = (len(document[name]) for name in ("head_dims", "head_dim_vs"))
    return (
        f"Run on {document['device']} on {runs[-1]['created_at'][:10]} ({software}) with seed {seeds}, in "
        f"{sum(run['seconds'] for run in runs):.0f} s by {runs[-1]['jobs']} processes: {document['cases']} cases of "
        f"{dims} values of head_dim and {dims_v} of head_dim_v. {counted[0].upper()}{counted[1:]}."
        f"{commit_sentence(run.get('commit') for run in runs)}"
    )


_VERDICTS = {
    "right": "right:",
    "refused": "refused, as by PyTorch:",
    "other_error": "refused, with another error than PyTorch's:",
    "accepted": "computed, but refused by PyTorch:",
    "inherited": "computed by PyTorch, whose own result breaks the bound:",
    "out_of_memory": "out of memory:",
    "wrong": "wrong:",
    "raised": "raised where PyTorch computes:",
    "dead": "ended the process:",
    "pytorch_dead": "raised where PyTorch's call ends the process:",
    "hung": "hung:",
    "broken": "the check itself failed:",
}


def _errors(document: Mapping[str, Any]) -> str:
    """Return the largest error of a case, in parts of the bound, for shares of the cases of a type."""
    rows = [[f"`{dtype}`", *_quantiles(own)] for dtype, own in sorted(document["ratios"].items())]
    shares = [f"{share:.0%} of the cases" for share in BOUNDS]
    return "Largest error of a case, in parts of its bound:\n\n" + markdown_table(("data type", *shares, "all"), rows)


def _quantiles(histogram: Mapping[str, Any]) -> list[str]:
    bins, total = histogram["bins"], sum(histogram["bins"])
    cells = []
    for share in BOUNDS:
        passed, place = 0, 0
        while place < len(bins) and passed + bins[place] < share * total:
            passed += bins[place]
            place += 1
        cells.append(f"up to {(place + 1) / len(bins):.2f}")
    return [*cells, f"{histogram['largest']:.2f}"]


def _counts(heading: str, rows: Mapping[str, Mapping[str, int]]) -> str:
    """Return the cases and failures of every value, the most frequent first."""
    ordered = sorted(rows.items(), key=lambda row: (-row[1]["cases"], row[0]))
    cells = [[f"`{name}`", str(row["cases"]), str(row["failed"])] for name, row in ordered]
    return markdown_table((heading, "cases", "failed"), cells)


def _failures(kinds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for every kind of failure, with what runs its first case again."""
    ordered = sorted(kinds.items(), key=lambda row: (-row[1]["count"], row[0]))
    shown = [
        f"- {row['count']} times: {_in_a_line(kind)} (`--seed {row['seed']} --case {row['number']}`, found after "
        f"{row['cases_before']} cases)"
        for kind, row in ordered[:FAILURES_SHOWN]
    ]
    more = len(ordered) - len(shown)
    return [*shown, f"- and {more} kinds more"] if more else shown


def _in_a_line(text: str) -> str:
    return escape(" ".join(text.split()))
