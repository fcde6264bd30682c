"""Ratios that were measured, with where and when."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from blocktune.kernels.values.shape import SHORT_DTYPES, AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Where a ratio is from.

    file: its name in results/. taken_at: as ISO 8601. commit: of the kernels; empty where the file does not say it.
    """

    file: str
    taken_at: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape: how many times as fast ours is as its rival.

    label: of the shape. rival: the fastest of those that it was compared with.
    """

    label: str
    ratio: float
    rival: str
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The cells of one device.

    software: versions by name. rivals: everyone who was timed in some cell, but ours.
    """

    device: str
    software: Mapping[str, frozenset[str]]
    rivals: tuple[str, ...]
    cells: tuple[Cell, ...]


def merge_cells(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return one measurement for every device, in their order, with the newest cell of every shape."""
    by_device: dict[str, Measurement] = {}
    for measurement in measurements:
        earlier = by_device.get(measurement.device)
        by_device[measurement.device] = measurement if earlier is None else _both(earlier, measurement)
    return list(by_device.values())


def _both(one: Measurement, other: Measurement) -> Measurement:
    cells = {cell.label: cell for cell in one.cells}
    for cell in other.cells:
        there = cells.get(cell.label)
        if there is None or there.record.taken_at < cell.record.taken_at:
            cells[cell.label] = cell
    names = dict.fromkeys((*one.software, *other.software))
    software = {name: one.software.get(name, frozenset()) | other.software.get(name, frozenset()) for name in names}
    rivals = tuple(sorted({*one.rivals, *other.rivals}, key=str.casefold))
    return replace(one, software=software, rivals=rivals, cells=tuple(cells.values()))


def fastest(label: str, own_us: float, rivals_us: Mapping[str, float], record: Record) -> Cell | None:
    """Return the cell of a shape next to the fastest of some rivals; None where none was timed."""
    if not rivals_us:
        return None
    name = min(rivals_us, key=rivals_us.__getitem__)
    return Cell(label=label, ratio=rivals_us[name] / own_us, rival=name, record=record)


def short_device(name: str) -> str:
    """Return the model in the name of a device."""
    return name.removeprefix("NVIDIA ").split()[0]


def short_label(shape: AttentionShape) -> str:
    """Return the label of a shape without what the name of its target says."""
    corner = "" if shape.causal_offset else "-lower-right"  # with equal lengths both corners are the same
    dtype = f" {SHORT_DTYPES[shape.dtype]}"
    return shape.label.replace(dtype, "").replace(corner, "").removesuffix(" backward")


def in_order(names: Collection[str], order: Collection[str]) -> tuple[str, ...]:
    """Return some names in the order of others."""
    return tuple(name for name in order if name in names)
