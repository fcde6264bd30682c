"""The configs of one kernel as a table: what each takes from a multiprocessor, and which of them are of no use."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from blocktune.kernels.hardware.device import ComputeLimits, DeviceSpec
from blocktune.kernels.values.text import counted
from blocktune.tuner.dry_run.config_row import Flaw, OfflineConfig
from blocktune.tuner.profile.instruction_mix import InstructionMix

COLUMNS = ("", "config", "registers", "spilled, B", "shared, B", "blocks/SM", "occupancy", "least time", "remark")

NO_TIME = (
    "Ranked by what configs take: those that fit, fewest spilled bytes, most warps, fewest registers. It is no time."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTable:
    """The configs of a kernel's call, in the order of its list.

    label: of the call. device: None where only a compute capability is known. listed: how many configs the list has
    before it is pruned; 0 without a list. mix: the instructions of the first config by rank.
    """

    kernel: str
    label: str
    limits: ComputeLimits
    device: DeviceSpec | None
    rows: tuple[OfflineConfig, ...]
    listed: int = 0
    mix: InstructionMix | None = None

    @property
    def ranked(self) -> tuple[OfflineConfig, ...]:
        """The rows by what the configs take, the least first, which is no order by time."""
        return tuple(sorted(self.rows, key=lambda row: row.rank))

    @property
    def device_name(self) -> str:
        """What the configs are compiled for, for people."""
        return f"compute capability {self.limits.name}" if self.device is None else self.device.name

    @property
    def title(self) -> str:
        """What stands above it."""
        pruned = f" of the {self.listed}" if self.listed > len(self.rows) else ""
        size = f"{counted(len(self.rows), 'config')}{pruned} of its list" if self.listed else "as it is launched"
        return " ".join(filter(None, (self.kernel, self.label, f"on {self.device_name}: {size}")))

    @property
    def flaw_counts(self) -> str:
        """How many configs have a flaw, in words; empty where none has."""
        counts = {flaw: sum(flaw in row.flaws for row in self.rows) for flaw in Flaw}
        words = {Flaw.UNFIT: "cannot run", Flaw.SPILLS: "spill", Flaw.DUPLICATES: "have the code of another one"}
        found = [f"{counts[flaw]} {text}" for flaw, text in words.items() if counts[flaw]]
        return f"Of {counted(len(self.rows), 'config')}, {', '.join(found)}." if found else ""

    def flawed(self, kinds: Collection[Flaw] = tuple(Flaw)) -> Iterator[tuple[OfflineConfig, Flaw, str]]:
        """Yield the configs with a flaw of these kinds, in the order of the list."""
        for row in self.rows:
            yield from ((row, flaw, words) for flaw, words in row.flaws.items() if flaw in kinds)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows by rank, as people read them."""
        return [_cells(row, self.device) for row in self.ranked]

    def words(self) -> str:
        """Return what is known next to the rows, a sentence a line."""
        return "\n".join(filter(None, (self.flaw_counts, _costs_text(self), _mix_text(self.mix))))

    def to_json(self) -> dict[str, Any]:
        ranks = {row.number: rank for rank, row in enumerate(self.ranked, 1)}
        return {
            "kernel": self.kernel,
            "call": self.label,
            "device": None if self.device is None else self.device.name,
            "cc": self.limits.name,
            "listed": self.listed,
            "configs": [_row_json(row, self.device) | {"rank": ranks[row.number]} for row in self.rows],
            "instruction_mix": None if self.mix is None else self.mix.to_json(),
        }

    def __str__(self) -> str:
        """Return the table as text."""
        rows = [COLUMNS, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
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


def _cells(row: OfflineConfig, device: DeviceSpec | None) -> tuple[str, ...]:
    if row.fit is None:
        return (str(row.number), row.label, "-", "-", "-", "-", "-", "-", row.remark())
    taken, fit = row.fit.resources, row.fit
    least_us = _least_us(row, device)
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


def _row_json(row: OfflineConfig, device: DeviceSpec | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "number": row.number,
        "parameters": dict(row.config.parameters),
        "outcome": str(row.compiled.outcome),
        "flaws": {str(flaw): words for flaw, words in row.flaws.items()},
        "same_as": row.same_as,
        "programs": row.programs,
    }
    if row.fit is None:
        found["error"] = row.compiled.error
    else:
        found |= row.fit.to_json()
    if row.costs is not None:
        found |= {"bytes": row.costs.bytes, "flops": row.costs.flops, "least_us": _least_us(row, device) or None}
    return found


def _least_us(row: OfflineConfig, device: DeviceSpec | None) -> float:
    """Return the time that no launch can beat; 0 where it is not known."""
    return 0.0 if row.costs is None or device is None else row.costs.least_us(device)


def _costs_text(table: OfflineTable) -> str:
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
