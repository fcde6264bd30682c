"""Configs apart from the shape that they were measured for: what follows from a shape is counted from the default's.

A kernel names the parameters whose best value follows from the shape (`follows_shape`), such as the number of splits.
Its default computes them for every shape. A winner of another shape says how many of the parameter's choices it was
above or below the default there, and that is what another shape takes over, never the value.

    there = relative_config(kernel, winner, kernel.default_config(shape, limits))    # splits: +1, twice the default's
    here = config_from(kernel, there, kernel.default_config(other, limits))
"""

from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.values.config import KernelConfig

RelativeConfig = tuple[tuple[str, int], ...]
"""The parameters of a kernel, those that follow from the shape as steps from the default's."""


def relative_config(kernel: AttentionKernel, config: KernelConfig, default: KernelConfig) -> RelativeConfig | None:
    """Return a config of a kernel by its steps from the default of its shape; None where it lacks a parameter or one
    that is counted in steps is no choice."""
    values, usual = config.parameters, default.parameters
    if values.keys() != kernel.parameters.keys():
        return None
    for name in kernel.follows_shape:
        choices = kernel.parameters[name]
        if values[name] not in choices or usual[name] not in choices:
            return None
        values[name] = choices.index(values[name]) - choices.index(usual[name])
    return tuple(values.items())


def config_from(kernel: AttentionKernel, relative: RelativeConfig, default: KernelConfig) -> KernelConfig:
    """Return the config that is these steps from a default, or as near as the choices reach."""
    values, usual = dict(relative), default.parameters
    for name in kernel.follows_shape:
        choices = kernel.parameters[name]
        place = choices.index(usual[name]) + values[name]
        values[name] = choices[min(max(place, 0), len(choices) - 1)]
    return KernelConfig.of(kernel.name, values)
