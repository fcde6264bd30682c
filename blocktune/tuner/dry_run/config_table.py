"""The configs of one kernel as a table: what each takes from a multiprocessor, and which of them are of no use."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from typing import Any

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.text import counted
from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.compile.answers import Compiled
from blocktune.tuner.occupancy.calculator import Occupancy, occupancy
from blocktune.tuner.profile.instruction_mix import InstructionMix
from blocktune.tuner.subject.costs import Costs

COLUMNS = ("", "config", "registers", "spilled, B", "shared, B", "blocks/SM", "occupancy", "least time", "remark")

NO_TIME = "Ranked by what configs take: those that fit, fewest spilled bytes, most warps, fewest registers. It is no time."


class Flaw(StrEnum):
    """What makes a config of no use, or of little."""

    SPILLS = "spills"
    UNFIT = "unfit"
    DUPLICATES = "duplicates"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigTable:
    """The configs of a kernel's call on a device, in the order of its list.

    label: of the call; empty where none was made. listed: how many configs the list has before it is pruned; 0 without
    a list. mix: the instructions of the first config by rank.
    """

    kernel: str
    label: str
    device: DeviceSpec
    rows: tuple[ConfigRow, ...]
    listed: int = 0
    mix: InstructionMix | None = None

    @property
    def ranked(self) -> tuple[ConfigRow, ...]:
        """The rows by what the configs take, the least first, which is no order by time."""
        return tuple(sorted(self.rows, key=lambda row: row.rank))

    @property
    def title(self) -> str:
        """What stands above it."""
        pruned = f" of {self.listed}" if self.listed > len(self.rows) else ""
        size = f"{len(self.rows)}{pruned} configs" if self.listed else "as it is launched"
        return " ".join(filter(None, (self.kernel, self.label, f"on {self.device.name}: {size}")))

    def flawed(self, kinds: Collection[Flaw] = tuple(Flaw)) -> Iterator[tuple[ConfigRow, Flaw, str]]:
        """Yield the configs with a flaw of these kinds, in the order of the list."""
        for row in self.rows:
            yield from ((row, flaw, words) for flaw, words in row.flaws.items() if flaw in kinds)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows by rank, as people read them."""
        return [_cells(row, self.device) for row in self.ranked]

    def words(self) -> str:
        """Return what is known next to the rows, a sentence a line."""
        counts = {flaw: sum(flaw in row.flaws for row in self.rows) for flaw in Flaw}
        found = [
            f"{counted(counts[Flaw.UNFIT], 'config')} of no launch" if counts[Flaw.UNFIT] else "",
            f"{counts[Flaw.SPILLS]} with spills" if counts[Flaw.SPILLS] else "",
            f"{counts[Flaw.DUPLICATES]} with the code of another one" if counts[Flaw.DUPLICATES] else "",
        ]
        lines = [f"{', '.join(filter(None, found))}." if any(found) else "", _costs_text(self), _mix_text(self.mix)]
        return "\n".join(filter(None, lines))

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "call": self.label,
            "device": self.device.name,
            "cc": self.device.limits.name,
            "listed": self.listed,
            "configs": [_row_json(row, self.device) for row in self.ranked],
            "instruction_mix": None if self.mix is None else self.mix.to_json(),
        }

    def __str__(self) -> str:
        """Return the table as text."""
        rows = [COLUMNS, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(filter(None, (self.title, *lines, self.words())))

    def __repr__(self) -> str:
        """Return the table as text, as `print` shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.cells())
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        words = escape(self.words()).replace("\n", "<br>")
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table><p>{words}</p>"


def rows_of(
    compiled: Mapping[LaunchConfig, Compiled],
    device: DeviceSpec,
    programs: Mapping[LaunchConfig, int | None],
    costs: Mapping[LaunchConfig, Costs],
) -> tuple[ConfigRow, ...]:
    """Return the rows of configs, in their order."""
    first: dict[tuple[object, ...], int] = {}
    rows = []
    for number, (config, ended) in enumerate(compiled.items(), 1):
        taken = ended.resources
        same = number
        if taken is not None and taken.code_sha256:
            same = first.setdefault((taken.code_sha256, taken.shared_bytes, taken.num_warps), number)
        rows.append(
            ConfigRow(
                number=number,
                config=config,
                compiled=ended,
                fit=None if taken is None else occupancy(taken, device.limits),
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


def _cells(row: ConfigRow, device: DeviceSpec) -> tuple[str, ...]:
    if row.fit is None:
        return (str(row.number), row.label, "-", "-", "-", "-", "-", "-", row.remark())
    taken, fit = row.fit.resources, row.fit
    least_us = 0.0 if row.costs is None else row.costs.least_us(device)
    return (
        str(row.number),
        row.label,
        str(taken.registers),
        str(taken.spill_bytes),
        f"{taken.shared_bytes:,}",
        str(fit.blocks_per_sm),
        f"{100 * fit.fraction:.0f} %",
        f"{least_us:.1f} us" if least_us else "-",
        row.remark(),
    )


def _row_json(row: ConfigRow, device: DeviceSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "number": row.number,
        "parameters": dict(row.config.parameters),
        "outcome": str(row.compiled.outcome),
        "flaws": {str(flaw): words for flaw, words in row.flaws.items()},
        "same_as": row.same_as,
        "programs": row.programs,
    }
    if row.fit is not None:
        found |= row.fit.to_json()
    if row.costs is not None:
        found |= {"bytes": row.costs.bytes, "flops": row.costs.flops, "least_us": row.costs.least_us(device)}
    return found


def _costs_text(table: ConfigTable) -> str:
    """Return what the first config by rank moves and computes."""
    costs = table.ranked[0].costs if table.rows else None
    if costs is None:
        return ""
    moved = f"{costs.bytes:,.0f} bytes and {costs.flops:,.0f} FLOP"
    return f"Config {table.ranked[0].number} moves and multiplies {moved} a launch by {costs.source}."


def _mix_text(mix: InstructionMix | None) -> str:
    """Return the kinds of instructions of a warp, the most frequent first."""
    if mix is None:
        return ""
    kinds: Sequence[tuple[str, int]] = sorted(mix.total.items(), key=lambda kind: -kind[1])
    return f"Its instructions: {', '.join(f'{count} {name}' for name, count in kinds if count)}."
