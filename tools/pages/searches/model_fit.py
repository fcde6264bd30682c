"""How far today's model is from the times of recorded sweeps: measured over predicted, by kernel and family.

    for row in fit_rows(map(load_sweep, sweep_files(["results/sweeps"]))):
        print(row.family, row.kernel, row.median)

Of every sweep the fastest configs of each kernel count, since these are what a search finds and `tune explain` shows.
The resources are those of the code that was measured.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from blocktune.tuner.lab.error_bands import predicted_times, time_ratio
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.lab.untuned import FAMILIES, family_of

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
    predicted, scores = predicted_times(sweep), sweep.scores
    for kernel in sorted({config.kernel for config in predicted}):
        configs = sorted((config for config in predicted if config.kernel == kernel), key=scores.__getitem__)
        yield kernel, [time_ratio(sweep, config, predicted[config]) for config in configs[:FASTEST]]


def _row(family: str, kernel: str, ratios: list[list[float]]) -> FitRow:
    every = [ratio for of_sweep in ratios for ratio in of_sweep]
    return FitRow(
        family=family, kernel=kernel, sweeps=len(ratios), median=median(every), low=min(every), high=max(every)
    )
