"""Statistics files, a line for each entry, which any number of processes add to. No other user can read them.
Nothing waits for a lock or a pipe, and damage costs a line."""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from blocktune.kernels.files.reading import read_bytes
from blocktune.kernels.files.variables import OptionalFile
from blocktune.kernels.values.errors import StoreError, UsageError

Entry = TypeVar("Entry")

Summed = Callable[[bytes], bytes]
"""Makes fewer lines of many."""


_HEAD_BYTES = 16 << 10
"""Of a file that exists: one of these lines has to be one of ours."""


def state_directory() -> Path | None:
    """Return `blocktune` in the user's state directory, or None for a user without a home."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        if not state.is_absolute():  # ignored, as the XDG Base Directory Specification has it
            state = Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return state / "blocktune"


def file_named_by(variable: OptionalFile, name: str) -> Path | None:
    """Return the file that an environment variable names, or one of this name in the user's state directory; None where
    the variable says `off`, or the user has no home.

    Raises:
        UsageError: the variable names a home directory that is not known.
    """
    if variable.is_off():
        return None
    named = variable.text()
    if named:
        return _expanded(named, variable.name)
    state = state_directory()
    return None if state is None else state / name


def _expanded(named: str, variable: str) -> Path:
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"The home directory of {named}, which {variable} names, is not known: {error} "
            "Give an absolute path, or `off`."
        ) from error


def append_lines(path: Path, added: bytes, max_bytes: int, summed: Summed) -> None:
    """Add lines to a file, and sum it up where it would outgrow its bound. A missing directory is made, and made
    private.

    Raises:
        BlockingIOError: another process writes at this moment.
        OSError: the place cannot be written, or the file is another one, which a variable names by mistake.
    """
    with _opened_to_add(path) as file:
        head = file.read(_HEAD_BYTES)
        if head and not summed(head):
            raise OSError(errno.EEXIST, "it is another file, and is left as it is", str(path))
        if _add(file, added, max_bytes):
            return
        file.seek(0)
        kept = summed(file.read(2 * max_bytes) + b"\n" + added)
        file.seek(0)
        file.write(kept)
        file.truncate()  # last, so that a process that is killed here leaves too many lines rather than none


def append_line(path: Path, line: str, max_bytes: int) -> None:
    """Add a line to a file, unless it has grown to its bound. A missing directory is made, and made private.

    Raises:
        OSError: the place cannot be written, or another process writes at this moment.
    """
    with _opened_to_add(path) as file:
        _add(file, line.encode() + b"\n", max_bytes)


def read_lines(path: Path, max_bytes: int, what: str, variable: OptionalFile) -> bytes:
    """Return the lines of a file, or none where it does not exist.

    Args:
        path: the file.
        max_bytes: its bound.
        what: of what it is a file.
        variable: the environment variable that names it.

    Raises:
        StoreError: it cannot be read, or is written at this moment.
    """
    try:
        with _locked(path, os.O_RDONLY, fcntl.LOCK_SH) as file:
            return file.read(2 * max_bytes)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreError(
            f"The file of {what} must be readable, but {path} is not ({error.strerror}). "
            f"Give another one by {variable.name}, or remove it: a new one is written."
        ) from error


def parsed_lines(content: bytes, parse: Callable[[Any], Entry]) -> Iterator[Entry]:
    """Yield what lines of JSON stand for. Half a line of a killed writer, and what is not ours, is passed over."""
    for line in content.splitlines():
        try:
            entry = parse(json.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            continue
        yield entry


def stored_lines(path: Path | None, max_bytes: int, parse: Callable[[Any], Entry]) -> list[Entry]:
    """Return what the lines of a private file stand for, as `parsed_lines` does; none where it cannot be read."""
    try:
        content = b"" if path is None else read_bytes(path, max_bytes, os.O_NOFOLLOW)
    except OSError:
        return []
    return list(parsed_lines(content, parse))


@contextmanager
def _opened_to_add(path: Path) -> Iterator[IO[bytes]]:
    """Yield the file, which is made if it is missing, as is its directory."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as file:
        yield file


def _add(file: IO[bytes], added: bytes, max_bytes: int) -> bool:
    """Add lines to the end of a file, and return whether they fit its bound: otherwise nothing is added."""
    size = file.seek(0, os.SEEK_END)
    fits = size + len(added) <= max_bytes
    if fits:
        file.write(added if _ends_a_line(file, size) else b"\n" + added)
    return fits


@contextmanager
def _locked(path: Path, flags: int, kind: int) -> Iterator[IO[bytes]]:
    """Yield the file, which other users of this module leave alone meanwhile."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    with os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "rb") as file:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield file


def _ends_a_line(file: IO[bytes], size: int) -> bool:
    """Return whether the next line can follow at once; not after a line whose writer was killed. Moves to the end."""
    if size == 0:
        return True
    file.seek(size - 1)
    return file.read(1) == b"\n"
