"""The tables that are made of results/DEVICE.libraries.json, which tools/libraries/bench.py writes."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import read_document
from tools.pages.document_tables import commit_sentence, markdown_table

SUFFIX = ".libraries.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-libraries", 1

NO_LIBRARIES = (
    "Kernels of libraries were not measured yet: `python -m tools.libraries.bench winners --out "
    "results/DEVICE.libraries.json` measures them on a GPU, `make results` shows them."
)

_KERNELS = (
    "kernel",
    "configs",
    "first of the list",
    "best of all",
    "ours over it",
    "Triton's over it",
    "the same in 10",
    "expanded, times as fast",
)
_RANKS = ("what happens", "ranks", "of them launched", "tuned in all", "configs")
_CALLS = ("known launch of", "Triton's tuner", "this tuner", "of Triton's")
_HELION = ("example", "tuned here in", "by Helion in", "time here", "Helion's", "times as fast")
_STARTS = ("first step of", "Triton's tuner", "this tuner", "times as fast")


def block(path: Path) -> str:
    """Return the tables of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NO_LIBRARIES
    document = read_document(path, "results", FORMAT, SCHEMA)
    parts = [_caption(document)]
    tables = {
        "kernels": _kernels,
        "steps": _steps,
        "starts": _starts,
        "processes": _processes,
        "ranks": _ranks,
        "calls": _calls,
        "faults": _faults,
        "helion": _helion,
    }
    for part in (made(document.get(name, ())) for name, made in tables.items()):
        parts += [part] if part else []
    return "\n\n".join(parts)


def _caption(document: Mapping[str, Any]) -> str:
    software = ", ".join(f"{name} {version}" for name, version in document["software"].items())
    rows = [
        row
        for name in ("kernels", "starts", "processes", "calls", "faults", "helion")
        for row in document.get(name, ())
    ]
    commit = commit_sentence([document.get("commit"), *(row.get("commit") for row in rows)])
    return f"Run on one {document['device']}, {document['date']}, with {software}.{commit}"


def _kernels(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    losses = {name: [row[name]["over_best"] for row in rows] for name in ("winner", "stock")}
    lines = (
        f"Of {len(rows)} kernels the winner is {statistics.median(losses['winner']):.2%} slower than the best "
        f"config of an exhaustive measurement in the median and {max(losses['winner']):.2%} at most; that of Triton's "
        f"own tuner {statistics.median(losses['stock']):.2%} and {max(losses['stock']):.2%}. {_repeats(rows)}"
        f"{_gains(rows)}",
        markdown_table(_KERNELS, map(_kernel_row, rows)),
    )
    return "\n\n".join(lines)


def _repeats(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how often searches from nothing found the winner that most of ten found."""
    found = [row["same_of_repeats"] for row in rows if "same_of_repeats" in row]
    if not found:
        return ""
    return (
        f"{sum(found)} of {10 * len(found)} searches from nothing found the winner that is usual for their kernel; on "
        f"{sum(same >= 9 for same in found)} of {len(found)} kernels at least nine of ten did. "
    )


def _gains(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what searches around the lists found; one that reached outside of its tensors has no end."""
    gains = [row["expanded"]["gain"] for row in rows if "expanded" in row]
    if not gains:
        return ""
    return (
        f"With `expand` {sum(gain >= 1.1 for gain in gains)} of {len(gains)} are at least 1.10 times as fast as with "
        f"Triton's choice, {max(gains):.2f} times at most."
    )


def _kernel_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    first = "-" if row["first_us"] is None else f"{row['first_us']:,.1f} µs"
    return (
        f"`{row['kernel'].rpartition(':')[2]}` ({row['step']})",
        str(row["configs"]),
        first,
        f"{row['best']['time_us']:,.1f} µs",
        f"{row['winner']['over_best']:.2%}",
        f"{row['stock']['over_best']:.2%}",
        str(row.get("same_of_repeats", "-")),
        f"{row['expanded']['gain']:.2f}" if "expanded" in row else "-",
    )


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how far results are apart, and which passes failed."""
    found = [row for row in rows if row["difference"]]
    errors = [error for row in found for error in row["difference"].values()]
    lines = [f"- {row['step']} failed: {row['error']}" for row in rows if row["error"]]
    if found:
        worst = "not finite" if None in errors else f"{max(errors):.1e} at most, in the Frobenius norm"
        lines.insert(
            0,
            f"Outputs and gradients of {len(found)} passes are compared with those under Triton's choices: the "
            f"relative difference is {worst}.\n",
        )
    return "\n".join(lines).strip()


def _starts(rows: Sequence[Mapping[str, Any]]) -> str:
    found = {(row["model"], row["start"], row["tuner"]): row for row in rows}
    lines = []
    for model, start in dict.fromkeys((row["model"], row["start"]) for row in rows):
        stock, ours = (found.get((model, start, tuner)) for tuner in ("stock", "blocktune"))
        lines.append((f"{model}, {start} start", _seconds(stock), _seconds(ours), _ratio(stock, ours)))
    meanwhile = dict.fromkeys(row["meanwhile"] for row in rows if row.get("meanwhile"))
    told = [f"Triton's tuner started while the machine ran {' and '.join(meanwhile)}."] if meanwhile else []
    return "\n\n".join([markdown_table(_STARTS, lines), *told]) if lines else ""


def _seconds(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    seconds = row["step_seconds"]
    if row["error"]:
        return "failed"
    return f"more than {row['longest_seconds']:.0f} s" if seconds is None else f"{seconds:.1f} s"


def _ratio(stock: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> str:
    if stock is None or ours is None or stock["error"] or ours["step_seconds"] is None:
        return "-"
    least = stock["step_seconds"] or stock["longest_seconds"]
    return f"{'' if stock['step_seconds'] else 'more than '}{least / ours['step_seconds']:.1f}"


def _processes(rows: Iterable[Mapping[str, Any]]) -> str:
    return "\n\n".join(
        f"{row['processes']} processes that started the {row['model']} step at once with empty caches tuned "
        f"{row['kinds_of_calls']} kinds of calls {row['tuned_in_all']} times in all, and disagree on "
        f"{row['disagreements']}; {row['ended']} of them ended."
        for row in rows
    )


def _ranks(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how ranks ended that have a GPU each, and what they launched with."""
    lines = []
    for row in rows:
        told = [each for each in row["ranks"] if each]
        numbers = (
            len(row["ranks"]),
            len(told),
            sum(each["tuned"] for each in told),
            len({each["config"] for each in told}),
        )
        lines.append((row["scene"], *map(str, numbers)))
    return f"Ranks with a GPU each:\n\n{markdown_table(_RANKS, lines)}" if rows else ""


def _calls(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the tuner adds to the host time of a launch that is known."""
    if not rows:
        return ""
    ours, stock = ([row[f"{who}_us"] - row["launch_us"] for row in rows] for who in ("ours", "stock"))
    lines = [
        (f"`{row['kernel'].rpartition(':')[2]}`", f"{theirs:.1f} µs", f"{own:.1f} µs", f"{own / theirs:.2f}")
        for row, theirs, own in zip(rows, stock, ours, strict=True)
    ]
    ratio = statistics.median(own / theirs for own, theirs in zip(ours, stock, strict=True))
    return (
        f"What a tuner adds to the host time of a launch that is known, in the median {ratio:.2f} of Triton's:\n\n"
        f"{markdown_table(_CALLS, lines)}"
    )


def _faults(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what configs cost that hang or fault."""
    return "\n\n".join(map(_fault, rows))


def _fault(row: Mapping[str, Any]) -> str:
    lost = "\n".join(f"- `{label.partition(' ')[2]}`: {_cause(reason)}" for label, reason in row["lost"].items())
    equal = "equals" if row["equal"] else "differs from"
    return (
        f"With `isolate`, a kernel lost {len(row['lost'])} of {row['configs']} configs, in {row['seconds']:.0f} s; no "
        f"answer within {row['answer_seconds']:.0f} s is a hang here. Its result {equal} that under Triton's tuner, "
        f"which had the others alone.\n\n{lost}"
    )


def _cause(reason: str) -> str:
    """Return the line of a reason that names the error, or all of it."""
    return next((line for line in reason.splitlines() if "Error: " in line), reason)


def _helion(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how examples do against the same operators in Helion."""
    if not rows:
        return ""
    failed = [f"- {row['example']} in Helion failed: {row['error']}" for row in rows if row["error"]]
    lines = [_helion_row(row) for row in rows if not row["error"]]
    limit = rows[-1]["helion_limit_seconds"]
    told = (
        f"Examples next to the same operators in Helion {rows[-1]['helion']}, whose search at quick effort ends after "
        f"{limit} s at most; caches are empty:"
    )
    return "\n\n".join(part for part in (told, markdown_table(_HELION, lines) if lines else "", *failed) if part)


def _helion_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["example"],
        f"{row['ours_seconds']:.1f} s",
        f"{row['helion_seconds']:.1f} s",
        f"{row['ours_us']:,.1f} µs",
        f"{row['helion_us']:,.1f} µs",
        f"{row['helion_us'] / row['ours_us']:.2f}",
    )
