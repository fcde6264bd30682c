"""The cost model's error on recorded sweeps: measured over predicted times, and the bands that ship.

    bands = error_bands(map(load_sweep, sweep_files(["results/sweeps"])))

The resources are those of the code that was measured.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.cost.bands import ANY_KERNEL, Band, BandKey
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.compiled_code import CompiledCode

NEAR_BEST = 1.1
"""Configs count that are this close to the fastest of their kernel, by the clock or by the model: a search ends with
one of the first and a prediction with one of the second."""

ENDS = (0.05, 0.95)
"""The percentiles of a band."""

FEWEST = 8
"""Measurements that a band takes."""

DECIMALS = 3


def error_bands(sweeps: Iterable[Sweep]) -> dict[BandKey, Band]:
    """Return the bands of every kernel, and of all kernels together, by family and features."""
    found: dict[BandKey, list[float]] = defaultdict(list)
    shapes: dict[BandKey, set[AttentionShape]] = defaultdict(set)
    for sweep in sweeps:
        for kernel, ratios in kernel_ratios(sweep).items():
            for name in (kernel, ANY_KERNEL):
                key = BandKey.of(name, sweep.shape)
                found[key] += ratios
                shapes[key].add(sweep.shape)
    order = sorted(found, key=lambda key: (key.family, key.features, key.kernel))
    return {key: _band(found[key], len(shapes[key])) for key in order if len(found[key]) >= FEWEST}


def kernel_ratios(sweep: Sweep) -> dict[str, list[float]]:
    """Return measured over predicted times of the configs that are near the best of their kernel, by kernel."""
    predicted, scores = predicted_times(sweep), sweep.scores
    found = {}
    for kernel in sorted({config.kernel for config in predicted}):
        configs = [config for config in predicted if config.kernel == kernel]
        near = _near_best(configs, scores) | _near_best(configs, predicted)
        found[kernel] = [time_ratio(sweep, config, predicted[config]) for config in configs if config in near]
    return found


def time_ratio(sweep: Sweep, config: KernelConfig, predicted_us: float) -> float:
    """Return the measured time of a config over a predicted one."""
    return (sweep.timed[config].time_us or 0.0) / predicted_us


def predicted_times(sweep: Sweep) -> dict[KernelConfig, float]:
    """Return the predicted time of every timed config whose resources were recorded and whose kernel there still is."""
    codes = {config: CompiledCode.recorded(trial.resources) for config, trial in sweep.timed.items()}
    return {
        config: predict_us(KERNELS[config.kernel], config, sweep.shape, sweep.device, code)
        for config, code in codes.items()
        if code is not None and config.kernel in KERNELS
    }


def _near_best(configs: Sequence[KernelConfig], times: Mapping[KernelConfig, float]) -> set[KernelConfig]:
    bound = NEAR_BEST * min(times[config] for config in configs)
    return {config for config in configs if times[config] <= bound}


def _band(ratios: Sequence[float], shapes: int) -> Band:
    low, high = (round(float(end) - 1, DECIMALS) for end in np.quantile(ratios, ENDS))
    return Band(low=low, high=high, trials=len(ratios), shapes=shapes)
