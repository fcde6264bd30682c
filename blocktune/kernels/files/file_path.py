"""Paths as callers give them: text or a `Path`, with `~` for the home directory."""

import os
from pathlib import Path

from blocktune.kernels.values.errors import UsageError


def file_path(path: str | os.PathLike[str]) -> Path:
    """Return the path that a caller names.

    Raises:
        UsageError: it is no path, or it is in a home directory that is not known.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes) or not os.fspath(path):
        raise UsageError(f"A path must be text or a pathlib.Path, but got {path!r:.100}. Name a file.")
    try:
        named, expanded = Path(path), Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"The home directory of {path} is not known: {error} Name an absolute path.") from error
    if expanded != named and not expanded.is_absolute():  # HOME is relative and would follow the working directory
        raise UsageError(f"The home directory of {path} must be absolute, but is {expanded}. Name an absolute path.")
    return expanded
