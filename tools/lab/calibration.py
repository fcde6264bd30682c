"""Fits the cost model's constants to recorded sweeps, within what is physically plausible.

    constants = calibrate([sweep for sweep in sweeps if sweep.shape.head_dim != 128])

What is fitted is the ranking: how much the logarithm of measured over predicted time varies within a sweep, the fast
configs counting most. A factor that all configs of a shape share is free, since it changes no choice.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktune.db.records.records import Trial
from blocktune.kernels.registry import get_kernel
from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.compiled_code import CompiledCode

BOUNDS = {
    "load_latency_cycles": (300.0, 1500.0),
    "held_iterations": (0.05, 1.0),
    "iteration_latency_cycles": (60.0, 500.0),
    "row_operations": (50.0, 300.0),
    "softmax_overlap": (1.0, 3.0),
    "cross_warp_cycles": (100.0, 1000.0),
    "second_warpgroup": (0.1, 1.0),
    "block_start_cycles": (2000.0, 10_000.0),
    "next_tile_cycles": (100.0, 2500.0),
    "spilled_iterations": (0.1, 1.0),
    "uneven_end": (0.3, 2.0),
}
"""What is fitted, and between which values. The other constants are of launches, clocks and device memory, which a
sweep of one device cannot tell apart from its rates."""

ROUNDS = 4
FIRST_STEP = 0.4
"""Of a constant's logarithm; a step that helps in neither direction is halved."""

DECAY = 0.25
"""A config that is slower than the best by this share counts 1/e of it."""

LEAST_WEIGHT = 0.02

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Measured:
    """One sweep: its compiled configs, their times in microseconds and their weights."""

    sweep: Sweep
    trials: tuple[Trial, ...]
    times_us: Times
    weights: Times

    @classmethod
    def of(cls, sweep: Sweep) -> "_Measured":
        trials = tuple(trial for trial in sweep.timed.values() if CompiledCode.recorded(trial.resources) is not None)
        scores = np.array([sweep.scores[trial.config] for trial in trials])
        weights = np.exp(-(scores / scores.min() - 1) / DECAY) + LEAST_WEIGHT
        times_us = np.array([trial.time_us for trial in trials], dtype=float)
        return cls(sweep, trials, times_us, weights / weights.sum())

    def misfit(self, constants: CostConstants) -> float:
        """Return the standard deviation of the logarithm of measured over predicted time."""
        shape, device = self.sweep.shape, self.sweep.device
        predicted = [
            predict_us(get_kernel(trial.config.kernel), trial.config, shape, device, code, constants)
            for trial in self.trials
            if (code := CompiledCode.recorded(trial.resources)) is not None
        ]
        off = np.log(self.times_us / np.array(predicted))
        mean = (self.weights * off).sum()
        return math.sqrt(float((self.weights * np.square(off - mean)).sum()))


def misfit(sweeps: Iterable[Sweep], constants: CostConstants = CONSTANTS) -> float:
    """Return the mean over the sweeps of the weighted standard deviation of the logarithm of measured over predicted
    time."""
    return float(np.mean([_Measured.of(sweep).misfit(constants) for sweep in sweeps]))


def calibrate(
    sweeps: Sequence[Sweep], *, start: CostConstants = CONSTANTS, on_round: Callable[[float], None] = lambda _: None
) -> CostConstants:
    """Return the constants of `BOUNDS`, one after the other moved as long as the misfit falls.

    Args:
        sweeps: what to fit to.
        start: where to begin.
        on_round: called with the misfit after every round over all constants.
    """
    measured = [_Measured.of(sweep) for sweep in sweeps]

    def mean(constants: CostConstants) -> float:
        return float(np.mean([entry.misfit(constants) for entry in measured]))

    found, lowest = start, mean(start)
    steps = dict.fromkeys(BOUNDS, FIRST_STEP)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            tried = [(mean(candidate), candidate) for candidate in _move_constant(found, name, step)]
            best, candidate = min(tried, key=lambda pair: pair[0])
            if best < lowest:
                found, lowest = candidate, best
            else:
                steps[name] = step / 2
        on_round(lowest)
    return found


def _move_constant(constants: CostConstants, name: str, step: float) -> list[CostConstants]:
    """Return one constant a step up and down, within its bounds."""
    low, high = BOUNDS[name]
    value = getattr(constants, name)
    changes: list[dict[str, Any]] = [
        {name: min(max(value * factor, low), high)} for factor in (math.exp(step), math.exp(-step))
    ]
    return [replace(constants, **change) for change in changes]
