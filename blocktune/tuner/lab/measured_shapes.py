"""Sweeps and winners as what the dispatcher's correction is made of: times of configs over that of the default."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from blocktune.db.records.records import Best
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.correction import LogRatio, Measured, RelativeConfig, relative_config
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.sweep_file import Sweep

PROMISING = 0.05
"""A config this close to the best of any measured shape, as a logarithm, is kept with its times of all shapes."""


def recorded_sweep(sweep: Sweep) -> Measured | None:
    """Return what a sweep says; None where it lacks every kernel's default of today."""
    hashes = {trial.config.kernel: trial.kernel_hash for trial in sweep.trials}
    times = {config: math.log(score) for config, score in sweep.scores.items()}
    able = [kernel for kernel in kernels_for(sweep.shape, sweep.device.limits) if kernel.name in hashes]
    defaults = {kernel.name: kernel.default_config(sweep.shape, sweep.device.limits) for kernel in able}
    known = [kernel for kernel in able if defaults[kernel.name] in times]
    if not known:
        return None
    first = defaults[known[0].name]
    scale = math.log(sweep.timed[first].time_us or 1.0) - times[first]
    predicted = _Predicted(sweep.shape, sweep.device)
    return Measured(
        shape=sweep.shape,
        first=known[0].name,
        level=times[first] + scale - predicted[first],
        defaults={
            kernel.name: LogRatio(
                times[defaults[kernel.name]] - times[first], predicted[defaults[kernel.name]] - predicted[first]
            )
            for kernel in known
        },
        configs={kernel.name: _over_default(kernel, defaults[kernel.name], times, predicted) for kernel in known},
        hashes={kernel.name: hashes[kernel.name] for kernel in known},
    )


def recorded_best(best: Best) -> Measured | None:
    """Return what a stored winner says; None where the default was not timed, or is of another kernel or no default any
    more."""
    kernel = get_kernel(best.config.kernel)
    default, time_us, speedup = best.default, best.default_time_us, best.speedup_over_default
    if default is None or time_us is None or speedup is None or default.kernel != kernel.name:
        return None
    limits = best.device.limits
    if kernel is not kernels_for(best.shape, limits)[0] or default != kernel.default_config(best.shape, limits):
        return None
    predicted = _Predicted(best.shape, best.device)
    times = {default: 0.0, best.config: -math.log(speedup)}
    return Measured(
        shape=best.shape,
        first=kernel.name,
        level=math.log(time_us) - predicted[default],
        defaults={kernel.name: LogRatio(0.0, 0.0)},
        configs={kernel.name: _over_default(kernel, default, times, predicted)},
        hashes={kernel.name: best.kernel_hash},
    )


def promising(measured: Iterable[Measured]) -> list[Measured]:
    """Return what was measured without the configs that are far from the best of every shape."""
    every = list(measured)
    good = {place for one in every for place in _good_configs(one)}
    return [
        replace(
            one,
            configs={
                kernel: kept
                for kernel, ratios in one.configs.items()
                if (kept := {config: ratio for config, ratio in ratios.items() if (kernel, config) in good})
            },
        )
        for one in every
    ]


def _good_configs(measured: Measured) -> Iterator[tuple[str, RelativeConfig]]:
    """Yield the configs of a shape that are near its best, or better than the default of their kernel."""
    over_first = {
        (kernel, config): measured.defaults[kernel].measured + ratio.measured
        for kernel, ratios in measured.configs.items()
        for config, ratio in ratios.items()
    }
    best = min([0.0, *over_first.values()])
    yield from (place for place, ratio in over_first.items() if ratio <= best + PROMISING)


class _Predicted(dict[KernelConfig, float]):
    """The logarithm of the model's time for a config, computed when it is first looked up."""

    def __init__(self, shape: AttentionShape, device: DeviceSpec) -> None:
        super().__init__()
        self._shape, self._device = shape, device

    def __missing__(self, config: KernelConfig) -> float:
        found = self[config] = math.log(usefulness(get_kernel(config.kernel), config, self._shape, self._device))
        return found


def _over_default(
    kernel: AttentionKernel,
    default: KernelConfig,
    times: Mapping[KernelConfig, float],
    predicted: _Predicted,
) -> dict[RelativeConfig, LogRatio]:
    """Return the times of a kernel's configs over that of its default, by their steps from it."""
    found = {}
    for config, time in times.items():
        relative = relative_config(kernel, config, default) if config.kernel == kernel.name else None
        if relative is not None and config != default and predicted[config] < math.inf:
            found[relative] = LogRatio(time - times[default], predicted[config] - predicted[default])
    return found
