"""The recorded sweeps from which several tables are made; each file is read once."""

from functools import cache
from pathlib import Path

from blocktune.tuner.lab.sweep_file import Sweep, load_sweep


@cache
def recorded_sweep(path: Path) -> Sweep:
    """Return the sweep in a file of results/."""
    return load_sweep(path)


def sweeps_in(folder: Path) -> list[Sweep]:
    """Return all sweeps of a folder, by name."""
    return [recorded_sweep(path) for path in sorted(folder.glob("*.gz"))]
