"""How far each target is reached on each device."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blocktune.cli.tune.bench import geometric_mean
from tools.pages.targets.cells import Cell, Measurement, merge_cells
from tools.pages.targets.target import DEVICES, Target


@dataclass(frozen=True, slots=True)
class Standing:
    """One target on one device."""

    target: Target
    measured: Measurement

    @property
    def ratios(self) -> list[float]:
        return [cell.ratio for cell in self.measured.cells]

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)

    @property
    def below(self) -> list[Cell]:
        """The cells below the target, the lowest first."""
        return sorted(
            (cell for cell in self.measured.cells if cell.ratio < self.target.least), key=lambda cell: cell.ratio
        )

    @property
    def mean_is_below(self) -> bool:
        return self.target.mean is not None and self.mean < self.target.mean

    @property
    def is_met(self) -> bool:
        return not self.below and not self.mean_is_below

    @property
    def lowest(self) -> Cell:
        return min(self.measured.cells, key=lambda cell: cell.ratio)


def standings(targets: Sequence[Target], results: Path) -> list[Standing]:
    """Return where some targets stand by the files of a folder, those of the first device first."""
    found = [
        Standing(target, measured)
        for target in targets
        for measured in merge_cells(measurement for source in target.sources for measurement in source.read(results))
    ]
    return sorted(found, key=lambda standing: _rank(standing.measured.device))


def _rank(device: str) -> tuple[int, str]:
    model, *_ = device.split(",")  # the regime follows
    return DEVICES.index(model.lower()), device
