"""The lines of `tune run` before and after a search."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from blocktune.cli.output.render import counts, percent, print_table, say
from blocktune.cli.output.winners import COLUMNS, origin_text, winner_rows
from blocktune.db.records.records import problem_label
from blocktune.kernels.values.text import counted
from blocktune.tuner.search.report import Budget, effective_budget

if TYPE_CHECKING:
    from blocktune.kernels.values.config import KernelConfig
    from blocktune.runtime.autotuned.config import LaunchConfig
    from blocktune.tuner.occupancy.calculator import Occupancy
    from blocktune.tuner.search.report import TuningReport


SHOWN_RULES = 3
"""Rules by which configs were dropped that are shown in words."""


def wait_text(budget: Budget, *, present: bool, exhaustive: bool) -> str:
    """Return how much will be tried and how long that takes at most, for a line before the wait."""
    bounds = effective_budget(budget, present=present, exhaustive=exhaustive)
    parts = ["every config" if bounds.trials is None else f"up to {counted(bounds.trials, 'config')}"]
    if bounds.seconds is not None:
        parts.append(f"for at most {bounds.seconds:g} s once the first is {'measured' if present else 'compiled'}")
    elif bounds.trials is None:
        parts.append("however long that takes")
    parts += ["then finals"] if present else []
    return f"{'measuring' if present else 'predicting'} {', '.join(parts)}"


def show_report(report: "TuningReport", place: str) -> None:
    """Print the winner with its rivals, why it won, what was tried, and where all that is kept."""
    best = report.best
    title = f"{problem_label(best.shape)} on {best.device.name}, {origin_text(best)}"
    print_table(COLUMNS, winner_rows(best, report.predicted_us), title=title)
    lines = ["", report.reason]
    if report.occupancy is not None:
        lines.append(occupancy_text(best.config, report.occupancy))
    lines.append(
        f"{counted(report.feasible, 'config')} can run; tried: {counts(report.outcomes)} "
        f"({report.resumed} of earlier runs)"
    )
    lines += [_ENDS[report.ended_by]] if report.ended_by else []
    lines += _dropped_lines(report.dropped)
    lines += _unsupported_lines(report.unsupported)
    lines += report.notes
    kept = "stored in" if report.stored else "not stored, since the search was cut short or a better one is in"
    lines.append(f"{kept} {place} after {report.seconds:.1f} s")
    say("\n".join(lines))


def occupancy_text(config: "KernelConfig | LaunchConfig", result: "Occupancy") -> str:
    """Return the occupancy of a winner in one line."""
    limiters = " and ".join(limiter.replace("_", " ") for limiter in result.limiters)
    blocks = result.blocks_per_sm
    warps = result.active_warps // blocks if blocks else 0
    line = (
        f"occupancy of the winner: {blocks} {'block' if blocks == 1 else 'blocks'}/SM of {warps} warps, "
        f"{percent(result.fraction)} of the SM's, limited by {limiters}"
    )
    started = config.parameters["num_warps"]
    if warps > int(started or 0):
        line += f" (`w{started}` is the default partition; {warps - int(started or 0)} warps are specialized)"
    return line


_ENDS = {
    "trials": "the search ended at its number of configs: --trials N or --exhaustive tries more",
    "seconds": "the search ended with its time: --time-budget SECONDS, --trials N or --exhaustive goes further",
}


def _dropped_lines(dropped: Mapping[str, int]) -> list[str]:
    """Return a line for each of the rules that dropped most configs, and one for the others."""
    order = sorted(dropped.items(), key=lambda rule: -rule[1])
    lines = [f"{count:,} invalid: {rule}" for rule, count in order[:SHOWN_RULES]]
    others = [count for _, count in order[SHOWN_RULES:]]
    if others:
        lines.append(f"{sum(others):,} invalid by {counted(len(others), 'other rule')} (--json names each)")
    return lines


def _unsupported_lines(unsupported: Mapping[str, str]) -> list[str]:
    if not unsupported:
        return []
    kernels = "1 kernel is" if len(unsupported) == 1 else f"{len(unsupported)} kernels are"
    return [f"{kernels} not for this shape (--json names each with its reason)"]
