"""Makes the tables of a differential check of speed (`make speed-fuzz`): how our kernels did next to PyTorch's, by
group, and every call that was slower."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from blocktune.runtime.selection.pytorch_rival import FORMAT, SCHEMA, SUFFIX
from tools.differential.speed.timing import MAX_EXTRA_US, MAX_RATIO
from tools.pages.document_tables import commit_sentence, markdown_table

__all__ = ["SUFFIX", "block"]

NOT_RUN = (
    "No differential check of speed is here yet: "
    "`make speed-fuzz OUT=blocktune/results/DEVICE.speed-fuzz.json` makes one, "
    "`make results` shows it."
)


def block(path: Path) -> str:
    """Return the tables of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    return tables(read_document(path, "differential check of speed", FORMAT, SCHEMA)) if path.exists() else NOT_RUN


def tables(document: Mapping[str, Any]) -> str:
    """Return what ran where, the means of the groups, and the calls that were slower."""
    cases, runs = document["cases"], document["runs"]
    slower = sorted((case for case in cases if case["slower"]), key=lambda case: -case["ratio"])
    seeds = ", ".join(str(run["seed"]) for run in runs)
    head = (
        f"Run on {document['device']} on {runs[-1]['taken_at'][:10]} (torch {document['torch']}) with seed {seeds}: "
        f"{len(cases)} drawn calls by our kernels and by the one that PyTorch chooses, in turns, with a cold L2 cache. "
        f"{len(slower)} take longer by more than {100 * MAX_RATIO - 100:.0f} % and {MAX_EXTRA_US:.0f} us."
        f"{commit_sentence(run['commit'] for run in runs)}"
    )
    header = ["group", "calls", "PyTorch's time over ours, mean", "least", "slower", "slower on the host"]
    groups = list(dict.fromkeys(case["group"] for case in cases))
    rows = [_group_row(group, [case for case in cases if case["group"] == group]) for group in groups]
    parts = [head, markdown_table(header, rows)]
    if slower:
        lines = [[case["label"], f"{case['ours_us']:.1f}", f"{case['pytorch_us']:.1f}"] for case in slower]
        parts.append(markdown_table(["slower call", "ours, us", "PyTorch's, us"], lines))
    return "\n\n".join(parts)


def _group_row(group: str, cases: Sequence[Mapping[str, Any]]) -> list[str]:
    timed = [1 / case["ratio"] for case in cases if not case["error"]]
    counts = (str(sum(case[name] for case in cases)) for name in ("slower", "host_slower"))
    return [group, str(len(cases)), f"{statistics.geometric_mean(timed):.3f}", f"{min(timed):.3f}", *counts]
