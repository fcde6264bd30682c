"""The cost of a fleet: a run of many shapes on many GPUs, simulated with the times of the recorded sweeps."""

import heapq
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from blocktune.tuner.fleet.streamed_store import pack_records
from blocktune.tuner.fleet.time_shares import FINALS_SECONDS
from blocktune.tuner.lab.replay import WORKERS
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.search.report import MEASURED_BUDGET
from tools.pages.document_tables import markdown_table

FOLDER = "sweeps"
"""Of results/: where the recorded times are."""

FLEETS = ((1, 24), (4, 24), (64, 1_000), (1_000, 10_000), (1_000, 100_000))
"""GPUs and shapes."""

COLUMNS = ("GPUs", "shapes", "trials", "rows", "sent, GB", "hours", "GPU hours", "GPUs idle, %")
NOTE = (
    "{trials} configs for each shape, compiled by {workers} processes for each GPU; {finals:.0f} s for the start and "
    "the finals of a job; {kinds} recorded sweeps of {device}, drawn at random. A trial is {bytes:.1f} kB on its way:"
)


@dataclass(frozen=True, slots=True)
class JobCost:
    """The cost of the search of one recorded shape. sent_bytes: of its trials as documents."""

    seconds: float
    sent_bytes: float


def job_cost(sweep: Sweep) -> JobCost | None:
    """Return what a search of a recorded shape costs; None where its code had been compiled before.

    Compiling and measuring go on side by side, so the slower one counts.
    """
    compiling = mean(trial.compile_seconds for trial in sweep.trials)
    measuring = mean(trial.bench_seconds for trial in sweep.trials)
    if not compiling:
        return None
    trials = MEASURED_BUDGET.trials or 0
    sent_bytes = mean(len(json.dumps(pack_records(sweep.device, [trial]))) for trial in sweep.trials[:trials])
    return JobCost(trials * max(compiling / WORKERS, measuring) + FINALS_SECONDS, trials * sent_bytes)


def makespan(seconds: Iterable[float], gpus: int) -> float:
    """Return when the last of some jobs ends, where whoever is idle takes the longest one that waits."""
    ends = [0.0] * gpus
    for job in sorted(seconds, reverse=True):
        heapq.heapreplace(ends, ends[0] + job)
    return max(ends)


def fleet_table(sweeps: Sequence[Sweep]) -> str:
    """Return the table of `FLEETS` from sweeps of one device."""
    costs = [cost for cost in map(job_cost, sweeps) if cost is not None]
    trials = MEASURED_BUDGET.trials or 0
    note = NOTE.format(
        trials=trials,
        workers=WORKERS,
        finals=FINALS_SECONDS,
        kinds=len(costs),
        device=sweeps[0].device.name,
        bytes=mean(cost.sent_bytes for cost in costs) / trials / 1e3,
    )
    return f"{note}\n\n{markdown_table(COLUMNS, (_row(costs, trials, *fleet) for fleet in FLEETS), words=())}"


def _row(costs: Sequence[JobCost], trials: int, gpus: int, shapes: int) -> list[str]:
    drawn = random.Random(shapes).choices(costs, k=shapes)
    hours = makespan((cost.seconds for cost in drawn), gpus) / 3600
    gpu_hours = sum(cost.seconds for cost in drawn) / 3600
    return [
        f"{gpus:,}",
        f"{shapes:,}",
        f"{shapes * trials:,}",
        f"{shapes * (trials + 1):,}",
        f"{sum(cost.sent_bytes for cost in drawn) / 1e9:.3g}",
        f"{hours:.2f}",
        f"{gpu_hours:.1f}",
        f"{100 * max(0.0, 1 - gpu_hours / (gpus * hours)):.0f}",
    ]
