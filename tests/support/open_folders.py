"""Temporary folders that every user can reach: pytest makes its own private."""

import tempfile
from pathlib import Path


def let_everyone_through(folder: Path) -> None:
    """Let every user search the folder and those above it, up to the one of all temporary files."""
    top = Path(tempfile.gettempdir())
    for each in (folder, *folder.parents):
        if each == top:
            return
        each.chmod(0o755)
