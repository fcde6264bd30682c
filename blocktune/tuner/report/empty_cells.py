"""Tiles of a sweep's grid that hold no measurement, each with the rule that its configs break."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from blocktune.kernels.registry import KERNELS
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.space import Dropped, SearchSpace
from blocktune.tuner.lab.sweep_file import Sweep

Place = tuple[str, int, int, int, int]
"""Kernel, block_m, block_n, num_warps and num_stages: what a cell of a heat map stands for."""


@dataclass(frozen=True, slots=True)
class EmptyCell:
    """A tile that no config of the kernel can have.

    reason: the rule that its configs break first, with the values of one of them.
    """

    place: Place
    reason: str

    def to_json(self) -> dict[str, Any]:
        kernel, block_m, block_n, num_warps, num_stages = self.place
        return {
            "kernel": kernel,
            "block_m": block_m,
            "block_n": block_n,
            "num_warps": num_warps,
            "num_stages": num_stages,
            "reason": self.reason,
        }


def empty_cells(sweep: Sweep) -> list[EmptyCell]:
    """Return the cells in which every config breaks a rule of its kernel, in the order of the search space.

    Kernels that are not in the sweep, or that are not known here, have no cells.
    """
    names = {trial.config.kernel for trial in sweep.trials}
    kernels = [KERNELS[name] for name in sorted(names) if name in KERNELS]
    space = SearchSpace.build(sweep.shape, sweep.device.limits, kernels)
    taken = {place_of(config) for config in space.feasible} | {place_of(trial.config) for trial in sweep.trials}
    return _cells(space.dropped, taken)


def place_of(config: KernelConfig) -> Place:
    """Return the cell of a config."""
    return config.kernel, config.block_m, config.block_n, config.num_warps, config.num_stages


def _cells(dropped: tuple[Dropped, ...], taken: set[Place]) -> list[EmptyCell]:
    by_place: dict[Place, list[Dropped]] = {}
    for entry in dropped:
        if place_of(entry.config) not in taken:
            by_place.setdefault(place_of(entry.config), []).append(entry)
    return [EmptyCell(place, _usual_reason(entries)) for place, entries in by_place.items()]


def _usual_reason(entries: list[Dropped]) -> str:
    """Return the reason that most configs of a cell have, the first of equals."""
    return Counter(entry.reasons[0] for entry in entries).most_common(1)[0][0]
