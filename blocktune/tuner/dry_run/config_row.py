"""One config of a kernel: what it takes from a multiprocessor, and what makes it of no use."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from blocktune.kernels.hardware.device import ComputeLimits
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy
from blocktune.tuner.subject.costs import Costs


class Flaw(StrEnum):
    """A reason why a config is of no use, or of little."""

    SPILLS = "spills"
    UNFIT = "unfit"
    DUPLICATES = "duplicates"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """One config of a kernel.

    number: its place in the list, from 1. compiled: how its compile ended. fit: None unless that went well. same_as:
    the first config of the list with the same machine code, if that is another one. programs: of the grid, where it is
    known. costs: bytes and operations of the launch, where the code tells them.
    """

    number: int
    config: LaunchConfig
    compiled: Compiled
    fit: Occupancy | None = None
    same_as: int | None = None
    programs: int | None = None
    costs: Costs | None = None

    @property
    def resources(self) -> KernelResources | None:
        return self.compiled.resources

    @property
    def flaws(self) -> dict[Flaw, str]:
        """What is wrong with it, each in words."""
        if self.fit is None:
            return {Flaw.UNFIT: f"{self.compiled.outcome}: {self.compiled.error}"}
        taken, found = self.fit.resources, dict[Flaw, str]()
        if not self.fit.blocks_per_sm:
            found[Flaw.UNFIT] = f"cannot be launched: too much of {_names(self.fit)}"
        if taken.spill_bytes:
            found[Flaw.SPILLS] = f"{taken.spill_bytes} bytes a thread are spilled"
        if self.same_as is not None:
            found[Flaw.DUPLICATES] = f"the code of {self.same_as}"
        return found

    @property
    def rank(self) -> tuple[float, ...]:
        """What it is ranked by, the best first."""
        if self.fit is None or not self.fit.blocks_per_sm:
            return (1.0, self.number)
        taken = self.fit.resources
        return (0.0, taken.spill_bytes, -self.fit.active_warps, taken.registers, self.number)

    @property
    def label(self) -> str:
        """Its parameters, for people."""
        return self.config.label.partition(" ")[2] or "-"

    def remark(self) -> str:
        """Return what is wrong with it, else what limits its blocks."""
        flaws = self.flaws
        if Flaw.UNFIT in flaws:
            return flaws[Flaw.UNFIT]
        if Flaw.DUPLICATES in flaws:
            return flaws[Flaw.DUPLICATES]
        return f"limited by {_names(self.fit)}" if self.fit else ""


def rows_of(
    compiled: Mapping[LaunchConfig, Compiled],
    limits: ComputeLimits,
    programs: Mapping[LaunchConfig, int | None],
    costs: Mapping[LaunchConfig, Costs],
) -> tuple[OfflineConfig, ...]:
    """Return the rows of configs, in their order."""
    first: dict[tuple[object, ...], int] = {}
    rows = []
    for number, (config, ended) in enumerate(compiled.items(), 1):
        taken = ended.resources
        same = number
        if taken is not None and taken.code_sha256:
            same = first.setdefault((taken.code_sha256, taken.shared_bytes, taken.num_warps), number)
        rows.append(
            OfflineConfig(
                number=number,
                config=config,
                compiled=ended,
                fit=None if taken is None else occupancy(taken, limits),
                same_as=None if same == number else same,
                programs=programs.get(config),
                costs=costs.get(config),
            )
        )
    return tuple(rows)


def flaws_named(text: str) -> tuple[Flaw, ...]:
    """Return the flaws that a text names, separated by commas.

    Raises:
        UsageError: one is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = next((name for name in names if name not in list(Flaw)), None)
    if unknown is not None or not names:
        raise UsageError(f"Flaws are {', '.join(Flaw)}, separated by commas, but got {text!r}.")
    return tuple(map(Flaw, names))


def _names(fit: Occupancy | None) -> str:
    return "" if fit is None else " and ".join(str(name).replace("_", " ") for name in fit.binding)
