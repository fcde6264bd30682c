"""Results of searches over recorded sweeps: how far from the best, how soon, and how well the model ranks alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.lab.racing import racing_rows
from blocktune.tuner.lab.replay import Replay, ReplayRun
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.search.strategies import DEFAULT, has_chance
from blocktune.tuner.search.verdict import decide_by_predictions

FORMAT = "blocktune-replay"
FORMAT_VERSION = 1
MEASUREMENTS = (5, 10, 20, 40, 80)
"""After how many measurements a search is judged."""

SEEDS, SEEDS_OF_A_TASK = 20, 5
RESAMPLES = 2000
"""Of the shapes, for the confidence interval of a mean."""

NEAR = 0.01
"""A search that has found a config this close to the best could be ended."""

AS_GOOD = 0.005
"""Means closer than this are called equal: it is the tie band of the finals."""

FEWEST = 8
"""Timed configs from which on an order is worth comparing."""

SHORT_LIST = 8

Regrets = NDArray[np.float64]
OnRun = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Searches of some sweeps by some strategies; `to_json` is what `tune lab replay` prints and keeps.

    runs: by strategy, for each sweep one run per seed.
    model: one row per kernel and direction, see `model_rows`.
    """

    sweeps: tuple[Sweep, ...]
    seeds: int
    runs: Mapping[str, Sequence[Sequence[ReplayRun]]]
    model: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "schema": FORMAT_VERSION,
            "devices": sorted({sweep.device.name for sweep in self.sweeps}),
            "measurements": list(MEASUREMENTS),
            "default": DEFAULT,
            "sweeps": [_sweep_row(sweep) for sweep in self.sweeps],
            "strategies": {name: self._strategy_row(name) for name in self.runs},
            "random_as_good": self.random_as_good,
            "racing": racing_rows(self.sweeps),
            "model": list(self.model),
        }

    @property
    def random_as_good(self) -> list[str]:
        """Labels of the shapes of which a random search knows as good a config as the default one after 20
        measurements, on the mean."""
        if not {DEFAULT, "random"} <= self.runs.keys():
            return []
        means = {name: self._regrets(name, 20).mean(axis=1) for name in (DEFAULT, "random")}
        equal = means["random"] - means[DEFAULT] <= AS_GOOD
        return [sweep.label for sweep, same in zip(self.sweeps, equal, strict=True) if same]

    def _strategy_row(self, name: str) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "regret": {str(count): _summary(self._regrets(name, count)) for count in MEASUREMENTS},
            "seconds": {
                str(count): float(np.median([run.seconds(count) for runs in self.runs[name] for run in runs]))
                for count in MEASUREMENTS
            },
            "seconds_to_near": self._seconds_to_near(name),
            "shapes": {
                sweep.label: [float(row.mean()) for row in self._by_count(name, index)]
                for index, sweep in enumerate(self.sweeps)
            },
        }

    def _seconds_to_near(self, name: str) -> float | None:
        """Return the median of the seconds after which searches are within `NEAR` of the best; None: most never are."""
        seconds = [run.seconds_within(NEAR) for runs in self.runs[name] for run in runs]
        median = float(np.median([np.inf if one is None else one for one in seconds]))
        return median if np.isfinite(median) else None

    def _regrets(self, name: str, count: int) -> Regrets:
        """Return the regrets [sweep, seed]"""
        return np.array([[run.regret(count) for run in runs] for runs in self.runs[name]])

    def _by_count(self, name: str, index: int) -> list[Regrets]:
        return [np.array([run.regret(count) for run in self.runs[name][index]]) for count in MEASUREMENTS]


def compare_strategies(
    sweeps: Iterable[Sweep],
    strategies: Sequence[str],
    *,
    seeds: int = SEEDS,
    workers: int = 1,
    on_run: OnRun = lambda told: None,
) -> ReplayReport:
    """Search every sweep by every strategy with every seed.

    Args:
        sweeps: of any shapes and devices.
        strategies: as `make_proposals` takes them.
        seeds: how many; a strategy without chance is run once, and counts as often.
        workers: processes that search at the same time; one searches in this process.
        on_run: called with what has been searched.
    """
    chosen = tuple(sweeps)
    tasks = _tasks(chosen, strategies, seeds)
    runs: dict[str, list[list[ReplayRun]]] = {name: [] for name in strategies}
    with ProcessPoolExecutor(workers, get_context("spawn")) if workers > 1 else nullcontext() as pool:
        for (sweep, name, used), own in zip(tasks, (pool.map if pool else map)(_searches, tasks), strict=True):
            if used.start == 0:
                runs[name].append([])
                on_run(f"{sweep.label}: {name}")
            runs[name][-1] += own if has_chance(name) else own * seeds
    return ReplayReport(sweeps=chosen, seeds=seeds, runs=runs, model=tuple(model_rows(map(Replay, chosen))))


def _tasks(sweeps: Sequence[Sweep], strategies: Sequence[str], seeds: int) -> list[tuple[Sweep, str, range]]:
    """Return every sweep by every strategy, a few seeds at a time, so that many processes can share a slow strategy;
    one without chance has one seed."""
    drawn = [range(first, min(first + SEEDS_OF_A_TASK, seeds)) for first in range(0, seeds, SEEDS_OF_A_TASK)]
    return [
        (sweep, name, some) for sweep in sweeps for name in strategies
        for some in (drawn if has_chance(name) else [range(1)])
    ]  # fmt: skip


def _searches(task: tuple[Sweep, str, range]) -> list[ReplayRun]:
    """Return one sweep by one strategy, with each of the seeds."""
    sweep, strategy, seeds = task
    replay = Replay(sweep)
    return [replay.run(strategy, seed=seed, measurements=MEASUREMENTS[-1]) for seed in seeds]


def model_rows(replays: Iterable[Replay]) -> list[dict[str, Any]]:
    """Return how well the model ranks without any measurement, by direction, for all kernels together (kernel None) and
    each.

    Medians and extremes over the sweeps: rank correlation (Spearman) of predicted and measured times, how much slower
    its choice (`decide_by_predictions`) and the best of its first eight are than the fastest of the same kernels,
    measured over predicted time. Of what it estimates before anything is compiled: the share of configs whose shared
    memory it knows exactly, its largest error, and the median error of the registers per thread.
    """
    groups: dict[tuple[str, str | None], list[dict[str, float]]] = {}
    for replay in replays:
        kernels = dict.fromkeys(config.kernel for config in replay.predicted)
        for kernel in (None, *kernels):
            found = _ranking(replay, kernel)
            if found is not None:
                groups.setdefault((_kind(replay.sweep), kernel), []).append(found)
    return [
        {"kind": kind, "kernel": kernel, "sweeps": len(rows)}
        | {name: _spread([row[name] for row in rows]) for name in rows[0]}
        for (kind, kernel), rows in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1] or ""))
    ]


def _ranking(replay: Replay, kernel: str | None) -> dict[str, float] | None:
    """Return the ranking of one sweep; None where too few configs have a time."""
    scores, timed = replay.sweep.scores, replay.sweep.timed
    configs = [config for config in scores if config in replay.predicted and kernel in (None, config.kernel)]
    if len(configs) < FEWEST:
        return None
    measured = np.array([scores[config] for config in configs])
    times = np.array([timed[config].time_us or 0.0 for config in configs])
    predicted = np.array([replay.predicted[config] for config in configs])
    slowdowns = measured[np.argsort(predicted, kind="stable")] / measured.min() - 1
    chosen = decide_by_predictions(dict(zip(configs, predicted, strict=True)), _default(replay, kernel))
    return {
        "rank_correlation": _correlation(_ranks(predicted), _ranks(measured)),
        "first_choice": float(scores[chosen] / measured.min() - 1),
        "best_of_8": float(slowdowns[:SHORT_LIST].min()),
        "measured_over_predicted": float(np.median(times / predicted)),
    } | _estimate_errors(replay, [config.label for config in configs])


def _default(replay: Replay, kernel: str | None) -> KernelConfig:
    """Return what this kernel, or the first of all that can and was swept, takes without any tuning."""
    able = get_kernel(kernel) if kernel else replay.serving[0]
    return able.default_config(replay.sweep.shape, replay.sweep.device.limits)


def _estimate_errors(replay: Replay, labels: Sequence[str]) -> dict[str, float]:
    wanted = set(labels)
    shared, registers = [], []
    for trial in replay.sweep.timed.values():
        if trial.resources is None or trial.config.label not in wanted:
            continue
        kernel = get_kernel(trial.config.kernel)
        guess = estimated_resources(kernel, trial.config, replay.sweep.shape, replay.sweep.device)
        shared.append(trial.resources.shared_bytes - guess.shared_bytes)
        registers.append(abs(trial.resources.registers - guess.registers))
    return {
        "shared_exact": float(np.mean(np.array(shared) == 0)),
        "shared_error_bytes": float(np.max(np.abs(shared))),
        "register_error": float(np.median(registers)),
    }


def _kind(sweep: Sweep) -> str:
    """Return forward, backward or decoding: what the model counts differently."""
    return "decoding" if sweep.shape.seqlen_q <= 16 < sweep.shape.seqlen_k else str(sweep.shape.direction)


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return Pearson's correlation; 0 where one side never varies."""
    varying = np.ptp(first) > 0 and np.ptp(second) > 0
    return float(np.corrcoef(first, second)[0, 1]) if varying else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks from 0, equal ones of equal values."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts + 1) / 2)[places])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "low": float(np.min(values)), "high": float(np.max(values))}


def _summary(regrets: Regrets) -> dict[str, float]:
    """Return of all runs the median and 95th percentile, and the mean with the interval that holds it with 95 %
    confidence, by resampling shapes, since the seeds of one are no evidence about another."""
    means = regrets.mean(axis=1)
    chosen = np.random.default_rng(0).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.percentile(means[chosen].mean(axis=1), [2.5, 97.5])
    return {
        "median": float(np.median(regrets)),
        "p95": float(np.percentile(regrets, 95)),
        "mean": float(means.mean()),
        "low": float(low),
        "high": float(high),
    }


def _sweep_row(sweep: Sweep) -> dict[str, Any]:
    best = min((trial for trial in sweep.timed.values()), key=lambda trial: sweep.scores[trial.config])
    return {
        "device": sweep.device.name,
        "shape": sweep.label,
        "configs": len(sweep.trials),
        "timed": len(sweep.timed),
        "best": best.config.label,
        "best_us": best.time_us,
        "environment": sweep.environment.digest,
    }
