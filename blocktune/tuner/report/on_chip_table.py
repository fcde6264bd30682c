"""On-chip tiles of a sweep's configs, one entry for every layout that occurs."""

from typing import Any

from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.tiles_by_kernel import on_chip_of

Layout = list[dict[str, Any]]
"""Tiles with `name`, `bytes`, `count` and `place`."""


def on_chip_table(sweep: Sweep, configs: list[KernelConfig]) -> tuple[list[Layout], list[int | None]]:
    """Return the layouts that occur and, for each config, which of them is its own.

    Args:
        sweep: whose shape and device the configs are for.
        configs: of the trials. A config whose kernel lists no tiles, or is not known here, has None.
    """
    layouts: list[Layout] = []
    numbers: list[int | None] = []
    for config in configs:
        layout = _layout(sweep, config)
        if layout is None:
            numbers.append(None)
            continue
        if layout not in layouts:
            layouts.append(layout)
        numbers.append(layouts.index(layout))
    return layouts, numbers


def _layout(sweep: Sweep, config: KernelConfig) -> Layout | None:
    kernel = KERNELS.get(config.kernel)
    if kernel is None:
        return None
    try:
        budget = on_chip_of(kernel, config, sweep.shape, sweep.device.limits)
    except (KeyError, UsageError):  # parameters of another version of the kernel
        return None
    if budget is None:
        return None
    return [
        {"name": tile.name, "bytes": tile.bytes, "count": tile.count, "place": str(tile.place)}
        for tile in budget.tiles
    ]  # fmt: skip
