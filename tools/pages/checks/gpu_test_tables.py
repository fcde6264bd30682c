"""The files that a run of the GPU tests writes (`make gpu-test RECORD=results/DEVICE`), and the tables that are made
of them: which tests passed where, and what a call costs on the host."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from blocktune.kernels.values.errors import UsageError
from tools.pages.document_tables import commit_sentence, escape, markdown_table

SUITE, COSTS = ".gpu-tests.json", ".host-cost.json"
SUFFIXES = (SUITE, COSTS)
"""How the names of such files in results/ end."""

SUITE_FORMAT, COSTS_FORMAT, SCHEMA = "blocktune-gpu-tests", "blocktune-host-cost", 1
FORMATS = {SUITE: SUITE_FORMAT, COSTS: COSTS_FORMAT}

SUITE_COLUMNS = ("tests", "passed", "failed", "skipped", "seconds")
COSTS_COLUMNS = {
    "look_up": "look-up",
    "attention": "`blocktune.attention`",
    "compiled_kernel": "`CompiledKernel[grid]`",
    "bare_launch": "`kernel[grid]`",
    "stock_autotune": "`@triton.autotune`",
    "sdpa": "PyTorch's attention",
}
"""What is timed, by its name in the file."""
ENTRY_COLUMNS = ("call", "ours", "PyTorch's attention", "ratio")


def block(path: Path) -> str:
    """Return the tables of a file; nothing where there is no such file yet.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return ""
    return suite_tables(read_run(path)) if path.name.endswith(SUITE) else costs_table(read_run(path))


def read_run(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    wanted = next((FORMATS[suffix] for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    if wanted is None:
        raise UsageError(f"{path} is not a recorded run, which is named *{SUITE} or *{COSTS}. Name another file.")
    return read_document(path, "recorded run", wanted, SCHEMA)


def suite_tables(document: Mapping[str, Any]) -> str:
    """Return how the tests of every file did, which failed, and why some were skipped."""
    files = document["files"]
    rows = [_suite_cells(name, files[name]) for name in sorted(files)]
    total = [str(sum(len(row["failed"]) if key == "failed" else row[key] for row in files.values()))
             for key in ("passed", "failed", "skipped")]  # fmt: skip
    seconds = sum(row["seconds"] for row in files.values())
    parts = [
        f"{_place(document)}, by {_commands(document)}: {total[0]} tests passed, {total[1]} failed, {total[2]} were "
        f"skipped, in {seconds:.0f} s.{_commits(document)}",
        markdown_table(SUITE_COLUMNS, [*rows, ["all", *total, f"{seconds:.0f}"]]),
    ]
    failures = [failure for name in sorted(files) for failure in files[name]["failed"]]
    if failures:
        parts.append("Failed:\n\n" + "\n".join(f"- `{each['test']}`: {escape(each['message'])}" for each in failures))
    reasons = sum((Counter(row["reasons"]) for row in files.values()), Counter[str]())
    if reasons:
        lines = (f"- {count}: {escape(reason)}" for reason, count in reasons.most_common())
        parts.append("Skipped, because:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _suite_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    return [f"`{name}`", str(row["passed"]), str(len(row["failed"])), str(row["skipped"]), f"{row['seconds']:.0f}"]


def costs_table(document: Mapping[str, Any]) -> str:
    """Return the host time of a call of every kernel, and of every entry point: medians, with the 99th percentile in
    brackets."""
    rows, entries = document["rows"], document.get("entries", {})
    parts = [
        f"{_place(document)}: host time in microseconds, the median of {document['calls']} calls and in brackets "
        "their 99th percentile, without gradients, as in serving. The look-up finds the plan of a call; "
        "`blocktune.attention` is all of a call, its output's memory included. The next three columns are what "
        f"starting the same kernel costs in other ways, with all arguments at hand.{_commits(document)}",
        markdown_table(
            ("kernel", *COSTS_COLUMNS.values()),
            [[f"`{name}`", *_cost_cells(rows[name])] for name in sorted(rows)],
        ),
    ]
    if entries:
        parts += [
            "Calls of every entry point, of tiny tensors, and of PyTorch's attention where it has the same, "
            "measured in turns; the ratio is ours to PyTorch's.",
            markdown_table(ENTRY_COLUMNS, [[name, *_entry_cells(entries[name])] for name in entries]),
        ]
    return "\n\n".join(parts)


def _entry_cells(row: Mapping[str, Any]) -> list[str]:
    ours, pytorchs = row["ours"], row.get("sdpa")
    ratio = "-" if pytorchs is None else f"{ours['median_us'] / pytorchs['median_us']:.2f}"
    return [_time_cell(ours), "-" if pytorchs is None else _time_cell(pytorchs), ratio]


def _cost_cells(row: Mapping[str, Any]) -> list[str]:
    return [_time_cell(row[name]) if name in row else "-" for name in COSTS_COLUMNS]


def _time_cell(time: Mapping[str, float]) -> str:
    return f"{time['median_us']:.1f} ({time['p99_us']:.1f})"


def _place(document: Mapping[str, Any]) -> str:
    device, environment = document["device"], document["environment"]
    software = ", ".join(f"{name} {version}" for name, version in sorted(environment.items()) if version)
    return f"Run on {device or 'a machine without a GPU'} on {document['created_at'][:10]} ({software})"


def _commands(document: Mapping[str, Any]) -> str:
    return " and ".join(f"`{command}`" for command in document["commands"])


def _commits(document: Mapping[str, Any]) -> str:
    return commit_sentence(document.get("commits", ()))
