"""The report on a GPU's noise: spreads, drift, how regimes differ, and the tie band that follows."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from blocktune.db.records.records import Regime, Telemetry
from blocktune.tuner.lab.noise import Sample, SelfDuel, Study
from blocktune.tuner.measure.protocol import TIE_BAND

STATES = ("sm_clock_mhz", "power_w", "temperature_c")
"""What is reported of the GPU's state."""


def summarize(study: Study) -> dict[str, Any]:
    """Return a study in numbers, all of them plain.

    regimes: by name, each with
        candidates: how many measurements, and the 5th and 95th percentile of their times and of their ratios to the
            anchor, each over the median of its own config.
        finals: the same of the configs' medians in finals, and of these over the studied config's.
        duels: how many times a config met itself, how often one side won, and how far the sides were apart (95th
            percentile of the distance of their ratio from 1).
        drift: the last third of the candidates' times over the first third, and the same of their ratios.
        state: smallest, middle and largest clock, power and temperature, of candidates and of finals.
    order: by regime, the configs' places in the order of their final times, with their times over the studied one's.
    swapped: pairs of places that the regimes order differently by more than the tie band in both.
    tie_band: how far apart a config and itself are in 95 % of all finals.
    """
    regimes = {str(regime): _regime(study, regime) for regime in Regime if _has(study, regime)}
    order = {str(regime): _final_ratios(study, regime) for regime in Regime if _has(study, regime)}
    return {
        "regimes": regimes,
        "order": order,
        "swapped": _swapped_pairs(list(order.values())),
        "tie_band": _distance(study.duels),
        "tie_band_used": TIE_BAND,
    }


def _has(study: Study, regime: Regime) -> bool:
    return any(final.regime is regime for final in study.finals)


def _regime(study: Study, regime: Regime) -> dict[str, Any]:
    samples = [sample for sample in study.samples if sample.regime is regime]
    finals = [final for final in study.finals if final.regime is regime]
    duels = [duel for duel in study.duels if duel.regime is regime]
    by_config = list(zip(*(final.times_us for final in finals), strict=True))
    over_first = [[time / first for time, first in zip(row, by_config[0], strict=True)] for row in by_config[1:]]
    return {
        "candidates": {
            "count": len(samples),
            "time": _spread(_over_own_median((sample.config, sample.time_us) for sample in samples)),
            "ratio": _spread(_over_own_median((sample.config, sample.relative) for sample in samples if sample.config)),
        },
        "finals": {
            "count": len(finals),
            "time": _spread(_over_own_median(_number_rows(by_config))),
            "ratio": _spread(_over_own_median(_number_rows(over_first))),
        },
        "duels": {"count": len(duels), "won": sum(duel.won for duel in duels), "distance": _distance(duels)},
        "drift": _drift(samples),
        "state": {
            "candidates": _states(sample.telemetry for sample in samples),
            "finals": _states(final.telemetry for final in finals),
        },
    }


def _number_rows(rows: Iterable[Iterable[float]]) -> Iterable[tuple[int, float]]:
    return [(number, value) for number, row in enumerate(rows) for value in row]


def _over_own_median(values: Iterable[tuple[int, float]]) -> list[float]:
    """Return every value over the median of the values with its number, in their order."""
    given = list(values)
    groups: dict[int, list[float]] = {}
    for number, value in given:
        groups.setdefault(number, []).append(value)
    medians = {number: statistics.median(group) for number, group in groups.items()}
    return [value / medians[number] for number, value in given]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return the 5th and 95th percentile; None of nothing."""
    if not values:
        return None
    low, high = np.percentile(values, [5, 95])
    return {"low": round(float(low), 5), "high": round(float(high), 5)}


def _distance(duels: Iterable[SelfDuel]) -> float | None:
    """Return how far from 1 the ratios are, 95th percentile; None of nothing."""
    distances = [abs(duel.ratio - 1) for duel in duels]
    return round(float(np.percentile(distances, 95)), 5) if distances else None


def _drift(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Return the last third's median over the first third's, each value over its own median; None for too few."""
    third = len(samples) // 3
    if not third:
        return None
    times = _over_own_median((sample.config, sample.time_us) for sample in samples)
    ratios = _over_own_median((sample.config, sample.relative) for sample in samples)
    return {
        name: round(statistics.median(values[-third:]) / statistics.median(values[:third]), 5)
        for name, values in (("time", times), ("ratio", ratios))
    }


def _states(telemetry: Iterable[Telemetry]) -> dict[str, list[float] | None]:
    """Return the smallest, middle and largest of what NVML reported, by name."""
    taken = list(telemetry)
    found = {name: [value for one in taken if (value := getattr(one, name)) is not None] for name in STATES}
    return {
        name: [min(values), statistics.median(values), max(values)] if values else None
        for name, values in found.items()
    }


def _final_ratios(study: Study, regime: Regime) -> list[list[float]]:
    """Return [place, final time over the studied config's] of all configs, the fastest first."""
    rows = [final.times_us for final in study.finals if final.regime is regime]
    ratios = [statistics.median(row[place] / row[0] for row in rows) for place in range(len(study.configs))]
    return [[place, round(ratios[place], 5)] for place in sorted(range(len(ratios)), key=ratios.__getitem__)]


def _swapped_pairs(orders: Sequence[Sequence[Sequence[float]]]) -> list[list[int]]:
    """Return the pairs of places of which one is faster in one order and the other in another, by more than the tie
    band."""
    if len(orders) < 2:
        return []
    one, other = ({int(place): ratio for place, ratio in order} for order in orders[:2])
    return [
        [a, b] for a in one for b in one if one[a] * (1 + TIE_BAND) < one[b] and other[b] * (1 + TIE_BAND) < other[a]
    ]


def columns(study: Study) -> Mapping[str, Any]:
    """Return the measurements themselves, one list per field, cut to what a clock can resolve."""
    samples, finals, duels = study.samples, study.finals, study.duels
    return {
        "samples": {
            "regime": [str(sample.regime) for sample in samples],
            "at_seconds": [round(sample.at_seconds, 1) for sample in samples],
            "config": [sample.config for sample in samples],
            "time_us": [round(sample.time_us, 2) for sample in samples],
            "relative": [round(sample.relative, 5) for sample in samples],
        }
        | {name: [getattr(sample.telemetry, name) for sample in samples] for name in STATES},
        "finals": {
            "regime": [str(final.regime) for final in finals],
            "at_seconds": [round(final.at_seconds, 1) for final in finals],
            "times_us": [[round(time_us, 2) for time_us in final.times_us] for final in finals],
        }
        | {name: [getattr(final.telemetry, name) for final in finals] for name in STATES},
        "duels": {
            "regime": [str(duel.regime) for duel in duels],
            "at_seconds": [round(duel.at_seconds, 1) for duel in duels],
            "ratio": [round(duel.ratio, 5) for duel in duels],
            "won": [duel.won for duel in duels],
        },
    }
