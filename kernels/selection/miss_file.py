"""The file of misses: which shapes were called without a measurement of their own, on which device, and how often.

One JSON object per line: {"calls": 3, "device": "nvidia h200|9.0|132", "shape": {...}}. Any number of processes add
lines; those of equal device and shape are added up when they are read, and in the file itself when it has grown to its
bound. It is statistics: what is lost or damaged of it costs a line, never a call.
"""

import errno
import fcntl
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.kernels.values.shape import AttentionShape

VARIABLE = "BLOCKTUNE_MISSES"
OFF = ("0", "off", "no", "false")

MAX_BYTES = 1 << 20
MAX_KINDS = 1000
"""How many pairs of device and shape stay, the most frequent, when the file is summed up: about 300 bytes each."""

MAX_CALLS = 1 << 53
_MAX_DEVICE = 400

Miss = tuple[str, AttentionShape]
"""`DeviceSpec.key` and shape."""


def miss_path() -> Path | None:
    """Return BLOCKTUNE_MISSES, or `blocktune/misses.jsonl` in the user's state directory. None is nowhere: the variable
    says `off`, or the user has no home.

    Raises:
        UsageError: the variable names a home directory that is not known.
    """
    named = os.environ.get(VARIABLE, "")
    if named.lower() in OFF:
        return None
    if named:
        return _expanded(named)
    state = state_directory()
    return None if state is None else state / "misses.jsonl"


def state_directory() -> Path | None:
    """Return `blocktune` in the user's state directory, or None for a user without a home."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        if not state.is_absolute():  # ignored, as the XDG Base Directory Specification has it
            state = Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return state / "blocktune"


def _expanded(named: str) -> Path:
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{VARIABLE} names a file in a home directory, but that of {named} is not known: {error} "
            "Give an absolute path, or `off`."
        ) from error


def append_misses(path: Path, counts: Mapping[Miss, int]) -> None:
    """Add lines to the file, which no other user can read. A missing directory is made, and made private.

    Raises:
        BlockingIOError: another process writes at this moment.
        OSError: the place cannot be written.
    """
    added = b"".join(_line(miss, calls) for miss, calls in counts.items())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as file:
        size = file.seek(0, os.SEEK_END)
        if size + len(added) <= MAX_BYTES:
            file.write(added if _ends_a_line(file, size) else b"\n" + added)
            return
        file.seek(0)
        total = _summed(file.read(2 * MAX_BYTES))
        total.update(counts)
        file.seek(0)
        file.write(b"".join(_line(miss, calls) for miss, calls in total.most_common(MAX_KINDS)))
        file.truncate()  # last, so that a process that is killed here leaves too many lines rather than none


def append_private_line(path: Path, line: str, max_bytes: int) -> None:
    """Add a line to a file that no other user can read, unless it has grown to a bound. Makes a missing directory.

    Raises:
        OSError: the place cannot be written, or another process writes at this moment.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as file:
        size = file.seek(0, os.SEEK_END)
        added = line.encode() + b"\n"
        if size + len(added) <= max_bytes:
            file.write(added if _ends_a_line(file, size) else b"\n" + added)


def read_misses(path: Path) -> Counter[Miss]:
    """Return how often each shape was missed on each device. Invalid lines are passed over; no file means no misses.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        with _locked(path, os.O_RDONLY, fcntl.LOCK_SH) as file:
            return _summed(file.read(2 * MAX_BYTES))
    except FileNotFoundError:
        return Counter()
    except OSError as error:
        raise StoreError(
            f"The file of misses must be readable, but {path} is not ({error.strerror}). "
            f"Give another one by {VARIABLE}, or remove it: a new one is written."
        ) from error


@contextmanager
def _locked(path: Path, flags: int, kind: int) -> Iterator[IO[bytes]]:
    """Yield the file, which other users of this module leave alone meanwhile. Nothing here waits for a lock or a
    pipe."""
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


def _line(miss: Miss, calls: int) -> bytes:
    device, shape = miss
    return json.dumps({"calls": calls, "device": device, "shape": shape.to_json()}).encode() + b"\n"


def _summed(content: bytes) -> Counter[Miss]:
    total: Counter[Miss] = Counter()
    for line in content.splitlines():
        try:
            miss, calls = _parsed(json.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            continue  # half a line of a killed writer, or not ours
        total[miss] = min(total[miss] + calls, MAX_CALLS)
    return total


def _parsed(document: dict[str, object]) -> tuple[Miss, int]:
    device, calls = document["device"], document["calls"]
    if not isinstance(device, str) or len(device) > _MAX_DEVICE or type(calls) is not int or not 0 < calls <= MAX_CALLS:
        raise UsageError(f"A miss has a device and a count, but got {device!r:.100} and {calls!r:.100}.")
    return (device, AttentionShape.from_json(document["shape"])), calls  # type: ignore[arg-type]
