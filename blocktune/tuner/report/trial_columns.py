"""The trials of a sweep as columns: what was recorded of each, and what the models of today predict for it.

Measured columns are copied from the sweep and never rounded. Predicted ones keep `PREDICTED_DIGITS` digits, which is
more than the model knows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from blocktune.db.records.records import Trial
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.cost.breakdown import CostBreakdown
from blocktune.tuner.cost.model import predict_launches
from blocktune.tuner.cost.roofline import missing_rates
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.traffic.by_kernel import traffic_of

PREDICTED_DIGITS = 4

TERMS = tuple(field.name for field in fields(CostBreakdown))
"""Of the cost model, the total last but for `beside_us`."""

Columns = dict[str, list[Any]]


def in_order(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials in the order in which they were made."""
    return sorted(trials, key=lambda trial: trial.created_at)


def trial_columns(sweep: Sweep, trials: Sequence[Trial]) -> Columns:
    """Return a list for every column, with an entry for every trial.

    Args:
        sweep: what the trials are part of.
        trials: all of its trials, or some.
    """
    scores = sweep.scores
    return (
        _configs(trials)
        | _times(trials)
        | {"score": [scores.get(trial.config) for trial in trials]}
        | _resources(trials)
        | _states(trials)
        | _costs(sweep, trials)
        | _predictions(sweep, trials)
    )


def _configs(trials: Sequence[Trial]) -> Columns:
    """Return the config of each trial; its own parameters by name in `extra`."""
    return {
        "kernel": [trial.config.kernel for trial in trials],
        "block_m": [trial.config.block_m for trial in trials],
        "block_n": [trial.config.block_n for trial in trials],
        "num_warps": [trial.config.num_warps for trial in trials],
        "num_stages": [trial.config.num_stages for trial in trials],
        "extra": [dict(trial.config.extra) for trial in trials],
    }


def _times(trials: Sequence[Trial]) -> Columns:
    return {
        "outcome": [str(trial.outcome) for trial in trials],
        "error_text": [trial.error for trial in trials],
        "time_us": [trial.time_us for trial in trials],
        "relative": [trial.relative_to_anchor for trial in trials],
        "rounds": [len(trial.samples_us) for trial in trials],
        "low_us": [min(trial.samples_us, default=None) for trial in trials],
        "high_us": [max(trial.samples_us, default=None) for trial in trials],
        "energy_mj": [trial.energy_mj for trial in trials],
    }


def _resources(trials: Sequence[Trial]) -> Columns:
    names = ("registers", "shared_bytes", "static_shared_bytes", "spill_bytes", "num_warps", "barriers")
    found = [trial.resources for trial in trials]
    columns = {name: [None if each is None else getattr(each, name) for each in found] for name in names}
    return columns | {"block_warps": columns.pop("num_warps")}


def _states(trials: Sequence[Trial]) -> Columns:
    names = ("sm_clock_mhz", "temperature_c", "power_w", "throttle_reasons", "other_processes")
    return {name: [getattr(trial.telemetry, name) for trial in trials] for name in names}


def _costs(sweep: Sweep, trials: Sequence[Trial]) -> Columns:
    """Return what a trial cost, and when it was made, in seconds after the first."""
    first = min(trial.created_at for trial in sweep.trials)
    return {
        "at_seconds": [round((trial.created_at - first).total_seconds(), 3) for trial in trials],
        "bench_seconds": [trial.bench_seconds for trial in trials],
        "compile_seconds": [trial.compile_seconds for trial in trials],
    }


def _predictions(sweep: Sweep, trials: Iterable[Trial]) -> Columns:
    rows = [_predict(sweep, trial) for trial in trials]
    names = (*TERMS, "blocks_per_sm", "bytes_once", "bytes_uncached")
    return {name: [_round(row.get(name)) for row in rows] for name in names}


def _predict(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    """Return what the models say of a trial: nothing for a kernel that is not here, or for code that was never
    compiled."""
    kernel = KERNELS.get(trial.config.kernel)
    if kernel is None or trial.resources is None:
        return {}
    blocks = occupancy(trial.resources, sweep.device.limits).blocks_per_sm
    facts = {"blocks_per_sm": blocks} | _bytes(kernel, sweep, trial)
    if not blocks or missing_rates(sweep.device):
        return facts
    code = CompiledCode.recorded(trial.resources)
    if code is None:  # what the search predicted, which knew more of the code
        return facts | {"total_us": trial.predicted_us}
    return facts | asdict(predict_launches(kernel, trial.config, sweep.shape, sweep.device, code))


def _bytes(kernel: AttentionKernel, sweep: Sweep, trial: Trial) -> dict[str, int]:
    """Return the bytes of device memory: where L2 keeps what the blocks of a launch share, and where nothing is found
    in a cache. A config that its kernel no longer takes has none."""
    try:
        once = traffic_of(kernel, trial.config, sweep.shape, perfect_l2=True).total_bytes
        return {
            "bytes_once": once,
            "bytes_uncached": traffic_of(kernel, trial.config, sweep.shape).total_bytes,
        }
    except UsageError:
        return {}


def _round(value: float | int | None) -> float | int | None:
    return float(f"{value:.{PREDICTED_DIGITS}g}") if isinstance(value, float) else value
