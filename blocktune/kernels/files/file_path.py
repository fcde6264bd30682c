"""Paths as callers give them, text or a `Path`, with `~` for the home directory; and files that replace others."""

import hashlib
import os
import tempfile
from pathlib import Path

from blocktune.kernels.values.errors import UsageError

LONGEST_STEM = 180
"""Characters of a file's name in front of its endings. File systems take 255 for the whole."""

PRIVATE, FOR_ALL = 0o600, 0o644
"""Modes of a file: of a cache, and of an output."""


def short_stem(text: str) -> str:
    """Return a text as the stem of a file's name: of a long one the begin, and a digest that tells it from others."""
    if len(text) <= LONGEST_STEM:
        return text
    return f"{text[: LONGEST_STEM - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


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


def cache_folder() -> Path:
    """Return the folder `blocktune` of the user's cache: in XDG_CACHE_HOME, or in `~/.cache` where that is no absolute
    path."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache")) / "blocktune"


def replace_file(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write a file next to its place and move it there in one step: a reader sees the old content or all of the new. A
    link is replaced, not followed.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name:.100}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
