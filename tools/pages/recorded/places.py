"""Where a record lies: in results/, or in blocktune/results/ where it ships with the package."""

from pathlib import Path


def place_of(name: str, folder: Path) -> Path:
    """Return the path of a record, or of several where the name is a pattern such as `*.counters.csv`.

    Args:
        name: of a file, or a pattern.
        folder: results/ of a repository. What ships lies next to it, in blocktune/results/.
    """
    shipped = folder.parent / "blocktune" / "results"
    return (shipped if any(shipped.glob(name)) else folder) / name
