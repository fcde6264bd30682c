"""Makes the tables of results/NAME.parallel.json that docs/guide/several_gpus.md shows: tables FILE

Next to FILE it writes those of NAME.schedules.table.json, NAME.windows.table.json and NAME.rank-errors.table.json for
which FILE has rows.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocktune.db.exchange.document import save_text
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.parallel.plan.cost import fastest, machine_with, time_s
from blocktune.runtime.parallel.plan.schedule import Schedule
from tests.support.ranks.document import Row, measured, table
from tests.support.ranks.problems import problem
from tools.ranks.bench import ALONE

PASSES = {"forward": "forward", "both": "forward and backward"}
SCHEDULES = (
    "GPUs", "tokens", "pass", "schedule", "ms", "TFLOP/s a GPU", "of one GPU alone", "by the model", "GiB a rank",
    "PyTorch's time over it",
)  # fmt: skip
WINDOWS = ("GPUs", "what", "ms forward", "ms with backward", "over one GPU's forward", "over both of one GPU's")
IN_TURNS = "Own tokens alone: all GPUs at once, in turns with the rows of as many GPUs, which are over it. "
ERRORS = ("case", "schedule", "GPUs", "error")

Cells = Sequence[str]


def schedules(document: Row) -> dict[str, Any]:
    """Return the table of all lengths and schedules, PyTorch's own among them."""
    rows = [cells for own in calls(document) for cells in _of_call(document, own)]
    alone = measured(document, "alone", ranks=1)
    worst = max(abs(modelled_rate(document, row) / row["of_alone"] - 1.0) for row in forwards(document))
    how = (
        "causal attention of one sequence, bf16, 32 query heads of 128 over 8 key heads; the time of the slowest rank. "
        f"One GPU alone, at {alone[0]['length']:,} tokens: {rates(alone)}. {all_at_once(document)}`auto` marks what "
        f"the model takes where nothing was measured; its forwards are wrong by {worst:.1%} at most. By it a GPU "
        f"reaches at least {least(document):.3f} of its rate alone. {repeats(document)}GiB: the most that a rank had "
        "allocated, its own tensors and their gradients included."
    )
    return table(document, how, SCHEDULES, rows)


def rates(rows: Sequence[Row]) -> str:
    """Return the rates of GPUs that each attend to their own tokens, as part of a sentence."""
    return " and ".join(f"{row['tflops_a_rank']} TFLOP/s ({PASSES[row['direction']]})" for row in rows)


def all_at_once(document: Row) -> str:
    """Return the rates of all GPUs at once, each on its own tokens, as a sentence."""
    rows = [row for row in measured(document, "alone") if row["ranks"] > 1]
    return f"All at once, each on {rows[0]['length']:,} tokens of its own: {rates(rows)}. " if rows else ""


def least(document: Row) -> float:
    """Return the least rate over that of one GPU alone, of the schedules that today's model takes."""
    rows = measured(document, "together")
    return float(min(row["of_alone"] for row in rows if row["name"] == schedule_for(document, row)))


def repeats(document: Row) -> str:
    """Return the times of the longest ring that was measured more than once, as a sentence."""
    again = measured(document, "head start")
    if not again:
        return ""
    ranks, length = max((row["ranks"], row["length"]) for row in again)
    rows = measured(document, "together", name="ring", ranks=ranks, length=length, direction="forward")
    times = sorted(row["ms"] for row in (*rows, *measured(document, "head start", ranks=ranks, length=length)))
    return f"The ring's forward of {length:,} tokens took {times[0]:.0f} to {times[-1]:.0f} ms in {len(times)} turns. "


def forwards(document: Row) -> list[Row]:
    """Return the forwards by schedules that the model knows."""
    rows = measured(document, "together", direction="forward")
    return [row for row in rows if row["name"] in tuple(Schedule)]


def modelled_rate(document: Row, row: Row) -> float:
    """Return the rate of a forward over that of one GPU alone, by today's model."""
    machine, length, ranks = machine_with(device_named(document["device"]), one_host=True), row["length"], row["ranks"]
    alone_s = time_s(problem(length, 1), Schedule.RING, machine)
    return alone_s / ranks / time_s(problem(length, ranks), Schedule(row["name"]), machine)


def calls(document: Row) -> list[tuple[int, int, str]]:
    """Return the ranks, length and direction of each call that was measured."""
    return sorted(
        {(row["ranks"], row["length"], row["direction"]) for row in measured(document, "together")}, key=_order
    )


def _order(call: tuple[int, int, str]) -> tuple[int, int, bool]:
    return call[0], call[1], call[2] != "forward"


def _of_call(document: Row, call: tuple[int, int, str]) -> list[Cells]:
    ranks, length, direction = call
    rows = measured(document, "together", ranks=ranks, length=length, direction=direction)
    theirs = min((row["ms"] for row in rows if is_pytorch(row)), default=None)
    return [_cells(document, row, theirs) for row in sorted(rows, key=lambda row: row["ms"])]


def is_pytorch(row: Row) -> bool:
    """Tell whether a row is of PyTorch's context parallelism."""
    return bool(row["name"].startswith("PyTorch"))


def auto_schedule(document: Row, ranks: int, length: int, direction: str) -> str:
    """Return the schedule that today's model takes, as it was measured."""
    machine = machine_with(device_named(document["device"]), one_host=True)
    schedule = fastest(problem(length, ranks), machine, backward=direction == "both")
    return str(Schedule.RING if ranks == 2 and schedule is Schedule.ALL_GATHER else schedule)  # they are one then


def schedule_for(document: Row, row: Row) -> str:
    """Return the schedule that today's model takes for the call of a row."""
    return auto_schedule(document, row["ranks"], row["length"], row["direction"])


def _cells(document: Row, row: Row, theirs_ms: float | None) -> Cells:
    model = f"{modelled_rate(document, row):.3f}" if row in forwards(document) else "-"
    against = "-" if is_pytorch(row) or theirs_ms is None else f"{theirs_ms / row['ms']:.2f}"
    auto = " (`auto`)" * (row["name"] == schedule_for(document, row))
    return [
        str(row["ranks"]), f"{row['length']:,}", PASSES[row["direction"]], row["name"] + auto, f"{row['ms']:,.1f}",
        f"{row['tflops_a_rank']:.0f}", f"{row['of_alone']:.3f}", model, f"{row['peak_gib']:.2f}", against,
    ]  # fmt: skip


def windows(document: Row) -> dict[str, Any]:
    """Return the table of windows and of decoding."""
    rows = measured(document, "window")
    found: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["ranks"], row["name"]), {})[row["direction"]] = row["ms"]
    cells = [_window_cells(ranks, name, ms, _alone(found, ranks)) for (ranks, name), ms in sorted(found.items())]
    decoded = measured(document, "decode")
    cells += [[str(row["ranks"]), f"decoding, {row['name']}", f"{row['ms']:.3f}", "-", "-", "-"] for row in decoded]
    how = "bf16, 32 query heads of 128 over 8 key heads; the time of the slowest rank, calls in a row. "
    how += "A causal window of 4,096 over 65,536 tokens a rank. " * bool(rows)
    how += IN_TURNS * any(row["name"] == ALONE for row in rows)
    how += f"Decoding: one query over a cache of {decoded[0]['length']:,} rows that ranks share, or a rank's own rows."
    return table(document, how, WINDOWS, cells)


def _alone(found: dict[tuple[int, str], dict[str, float]], ranks: int) -> dict[str, float]:
    """Return the times of own tokens alone: in turns with those of so many ranks where that was measured, else of one
    GPU while the others rested."""
    return found[1, "contiguous"] | found.get((ranks, ALONE), {})


def _window_cells(ranks: int, name: str, ms: dict[str, float], alone: dict[str, float]) -> Cells:
    times = [f"{ms[direction]:.2f}" if direction in ms else "-" for direction in PASSES]
    over = [f"{ms[direction] / alone[direction]:.3f}" if direction in ms else "-" for direction in PASSES]
    return [str(ranks), f"window, {name}", *times, *over]


def rank_errors(document: Row) -> dict[str, Any]:
    """Return the table of errors."""
    rows = [row for row in document["rows"] if row["kind"] == "error"]
    cells = [
        [row["case"], row["schedule"], str(row["ranks"]), _error(row)]
        for row in sorted(rows, key=lambda row: (row["case"] != "causal", row["case"]))
    ]
    how = (
        "bf16, about a thousand tokens, 8 query heads of 128 over 4 key heads: the greatest difference of outputs, "
        "log-sum-exps and gradients from float64 on one device, relative to the largest number of each."
    )
    return table(document, how, ERRORS, cells)


def _error(row: Row) -> str:
    return f"{row['worst_of_largest']:.4f}" if "worst_of_largest" in row else row["left_out"].replace("|", "/")


TABLES = {"together": ("schedules", schedules), "decode": ("windows", windows), "error": ("rank-errors", rank_errors)}
"""The name of a table and what makes it, by a kind of rows that it needs."""


def tables(document: Row) -> dict[str, dict[str, Any]]:
    """Return the tables of what was measured, by their names."""
    kinds = {row["kind"] for row in document["rows"]}
    return {name: make(document) for kind, (name, make) in TABLES.items() if kind in kinds}


def summary(document: Row) -> list[str]:
    """Return a line for each call: our best, against one GPU alone, against PyTorch, and what `auto` loses."""
    lines = []
    for ranks, length, direction in calls(document):
        rows = measured(document, "together", ranks=ranks, length=length, direction=direction)
        ours = [row for row in rows if row["name"] in tuple(Schedule)]
        if not ours:
            continue
        best, theirs = min(ours, key=lambda row: row["ms"]), [row["ms"] for row in rows if is_pytorch(row)]
        against = f", {min(theirs) / best['ms']:.3f} x PyTorch's" if theirs else ""
        lines.append(f"{ranks} x {length} {direction}: {best['name']} at {best['of_alone']} of alone{against}")
    return lines


def main(path: Path) -> None:
    document = json.loads(path.read_text())
    for name, made in tables(document).items():
        place = path.with_name(path.name.replace("parallel.json", f"{name}.table.json"))
        save_text(json.dumps(made, indent=1, sort_keys=True) + "\n", place)
    sys.stdout.write("\n".join(summary(document)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
