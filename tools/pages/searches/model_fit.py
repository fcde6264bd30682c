"""How far today's model is from the times of recorded sweeps: measured over predicted, by kernel and family.

    for row in fit_rows(map(load_sweep, sweep_files(["results/sweeps"]))):
        print(row.family, row.kernel, row.median)

Of every sweep the fastest configs of each kernel count, since these are what a search finds and `tune explain` shows.
The resources are those of the code that was measured.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from blocktune.db.records.records import Trial
from blocktune.kernels.registry import get_kernel
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.lab.untuned import FAMILIES, family_of
from blocktune.tuner.occupancy.compiled_code import CompiledCode

FASTEST = 8
"""Configs of a kernel in a sweep that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """Measured over predicted time of one kernel in one family of shapes: the median over all that counts, and the
    lowest and highest of single configs."""

    family: str
    kernel: str
    sweeps: int
    median: float
    low: float
    high: float


def fit_rows(sweeps: Iterable[Sweep]) -> list[FitRow]:
    """Return a row for every kernel and family that was recorded, in the order of `FAMILIES`."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for sweep in sweeps:
        for kernel, ratios in _ratios(sweep):
            found.setdefault((family_of(sweep.shape), kernel), []).append(ratios)
    places = sorted(found, key=lambda place: (FAMILIES.index(place[0]), place[1]))
    return [_row(family, kernel, found[family, kernel]) for family, kernel in places]


def _ratios(sweep: Sweep) -> Iterator[tuple[str, list[float]]]:
    """Yield every kernel of a sweep with measured over predicted time of its fastest configs."""
    scores = sweep.scores
    by_kernel: dict[str, list[Trial]] = {}
    for trial in sweep.timed.values():
        if CompiledCode.recorded(trial.resources) is not None:
            by_kernel.setdefault(trial.config.kernel, []).append(trial)
    for kernel, trials in sorted(by_kernel.items()):
        fastest = sorted(trials, key=lambda trial: scores[trial.config])[:FASTEST]
        yield kernel, [_ratio(sweep, trial) for trial in fastest]


def _ratio(sweep: Sweep, trial: Trial) -> float:
    code = CompiledCode.recorded(trial.resources)
    assert code is not None
    assert trial.time_us is not None
    kernel = get_kernel(trial.config.kernel)
    return trial.time_us / predict_us(kernel, trial.config, sweep.shape, sweep.device, code)


def _row(family: str, kernel: str, ratios: list[list[float]]) -> FitRow:
    every = [ratio for of_sweep in ratios for ratio in of_sweep]
    return FitRow(
        family=family, kernel=kernel, sweeps=len(ratios), median=median(every), low=min(every), high=max(every)
    )
