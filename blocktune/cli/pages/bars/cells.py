"""Ratios that were measured, with where and when."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from blocktune.kernels.values.shape import SHORT_DTYPES, AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape: how many times as fast ours is as its rival.

    label: of the shape. rival: the fastest of those that it was compared with.
    """

    label: str
    ratio: float
    rival: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The cells of one file.

    taken_at: when, as ISO 8601. software: versions by name. rivals: everyone who was timed in some cell, but ours.
    """

    device: str
    taken_at: str
    commits: tuple[str, ...]
    software: Mapping[str, str]
    rivals: tuple[str, ...]
    cells: tuple[Cell, ...]


def fastest(label: str, own_us: float, rivals_us: Mapping[str, float]) -> Cell | None:
    """Return the cell of a shape next to the fastest of some rivals; None where none was timed."""
    if not rivals_us:
        return None
    name = min(rivals_us, key=rivals_us.__getitem__)
    return Cell(label=label, ratio=rivals_us[name] / own_us, rival=name)


def short_device(name: str) -> str:
    """Return the model in the name of a device."""
    return name.removeprefix("NVIDIA ").split()[0]


def short_label(shape: AttentionShape) -> str:
    """Return the label of a shape without what the name of its bar says."""
    corner = "" if shape.causal_offset else "-lower-right"  # with equal lengths both corners are the same
    dtype = f" {SHORT_DTYPES[shape.dtype]}"
    return shape.label.replace(dtype, "").replace(corner, "").removesuffix(" backward")


def in_order(names: Collection[str], order: Collection[str]) -> tuple[str, ...]:
    """Return some names in the order of others."""
    return tuple(name for name in order if name in names)
