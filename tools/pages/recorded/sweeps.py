"""The recorded sweeps from which several tables are made; each file is read once."""

from functools import cache
from pathlib import Path

from blocktune.tuner.lab.sweep_file import SUFFIX, Sweep, load_sweep, sweep_files


@cache
def recorded_sweep(path: Path) -> Sweep:
    """Return the sweep in a file of results/."""
    return load_sweep(path)


def sweeps_in(*folders: Path) -> list[Sweep]:
    """Return all sweeps of some folders, as `sweep_files` lists them; a folder may have none."""
    filled = [folder for folder in folders if any(folder.glob(f"*{SUFFIX}"))]
    return [recorded_sweep(path) for path in sweep_files(filled)]
