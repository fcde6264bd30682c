"""Measurements that are not in the database yet: a file of JSON lines next to it.

    {"checksum": "<16 hex>", "document": {...}, "gpu": "GPU-..."}

A document is what `tune export` would write of that one trial or winner. Each searching process has a file of its own,
which it keeps locked while it lives: a file that can be locked is one that a killed process left. The file is private,
and gone when all of it is stored.
"""

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import IO

from blocktune.db.exchange.document import document_from
from blocktune.db.exchange.importing import records_in
from blocktune.db.records.records import AnyBest, AnyTrial, Record, Trial
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.files.checksums import CHECKSUM, checksum_of
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.files.line_file import state_directory
from blocktune.kernels.files.ownership import doubts
from blocktune.kernels.files.variables import TRUST_OWNER
from blocktune.kernels.values.errors import StoreError

MAX_BYTES = 64 << 20
"""Of one file: some 25,000 trials."""

UNREADABLE_SUFFIX = ".unreadable"
"""Ends the name of a spool that has been folded in, but for lines that could not be read."""

_MAX_LINE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Left:
    """The contents of a spool. unreadable: lines that are torn or were changed."""

    trials: tuple[AnyTrial, ...]
    bests: tuple[AnyBest, ...]
    unreadable: int

    @property
    def is_empty(self) -> bool:
        return not (self.trials or self.bests or self.unreadable)


class Spool:
    """The file of this process for one store. It is made when the first record comes."""

    def __init__(self, target: StoreTarget) -> None:
        self._target = target
        self._file: IO[bytes] | None = None
        self._bytes = 0
        self.path: Path | None = None

    def keep(self, record: Record) -> None:
        """Add a record at the end. When this returns, the record outlives the process.

        Raises:
            UsageError: it could not be read again.
            OSError: no folder takes it.
            StoreError: the file has grown to its bound.
        """
        line = _line(record)
        _record(line)
        if self._bytes + len(line) > MAX_BYTES:
            raise StoreError(
                f"{self.path} would exceed the {MAX_BYTES >> 20} MiB of measurements that may wait for their "
                f"database. Make {self._target.label} reachable; `tune doctor` stores what waits."
            )
        if self._file is None:
            self._open(line)
            return
        self._append(self._file, line)

    def clear(self) -> None:
        """Forget what the file holds: all of it is stored. On a disk that fails it stays, to be stored once more."""
        if self._file is not None and self._bytes:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), 0)
                self._bytes = 0

    def close(self) -> None:
        """Let go of the file, and remove it if it is empty."""
        if self._file is None or self.path is None:
            return
        if not self._bytes:
            with suppress(OSError):  # an empty file that stays is removed by the next search
                self.path.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _open(self, line: bytes) -> None:
        """Make the file where there is room: next to the database, else in the user's state directory."""
        refused: OSError | None = None
        for folder, name in _places(self._target):
            try:
                self._make(folder, name, line)
                return
            except OSError as error:
                refused = error
        raise refused or FileNotFoundError("no folder for a spool")

    def _make(self, folder: Path, name: str, line: bytes) -> None:
        if folder == state_directory():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(dir=folder, prefix=f"{name}{os.getpid()}-", suffix=".jsonl")  # mode 0600
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._append(file, line)
        except BaseException:
            file.close()
            os.unlink(path)
            raise
        self._file, self.path = file, Path(path)

    def _append(self, file: IO[bytes], line: bytes) -> None:
        """Write a whole line or, as far as anyone can tell, nothing."""
        try:
            written = os.pwrite(file.fileno(), line, self._bytes)
            if written < len(line):  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), self._bytes)
            raise
        self._bytes += len(line)


def left_files(target: StoreTarget) -> list[Path]:
    """Return the spools of a store, whoever owns them, oldest first."""
    found = [
        path for folder, name in _places(target) if folder.is_dir() for path in folder.glob(f"{escape(name)}*.jsonl")
    ]
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))


@contextmanager
def left_records(path: Path) -> Iterator[Left | None]:
    """Yield the records of a spool that a killed process left; None where the process lives, or another one sees to it.

    When the block ends without an exception, they are stored, and the file is removed; one with lines that could not be
    read is kept under another name.

    Raises:
        StoreError: the file is another user's, or cannot be read or removed.
    """
    _require_own(path)
    with _lock_spool(path) as file:
        if file is None:
            yield None
            return
        left = _records(_content(file, path).split(b"\n"))
        yield left
        _put_away(path, keep=bool(left.unreadable))


@contextmanager
def _lock_spool(path: Path) -> Iterator[IO[bytes] | None]:
    """Yield the file of a spool, locked for as long; None where there is none, its process lives or another one sees to
    it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise _unreadable(path, error) from error
    with os.fdopen(descriptor, "rb") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        state = os.fstat(descriptor)
        yield file if stat.S_ISREG(state.st_mode) and state.st_nlink else None


def _content(file: IO[bytes], path: Path) -> bytes:
    try:
        return file.read(MAX_BYTES + _MAX_LINE_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"Measurements wait in {path}, which cannot be read: {error.strerror}. Correct its mode.")


def _put_away(path: Path, *, keep: bool) -> None:
    """Remove a spool whose records are stored, or keep it under another name."""
    try:
        if keep:
            path.rename(path.with_suffix(UNREADABLE_SUFFIX))
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"The measurements in {path} are stored, but the file cannot be removed: {error.strerror}. Remove it."
        ) from error


def _require_own(path: Path) -> None:
    reasons = () if TRUST_OWNER.is_on() else tuple(doubts(path))
    if reasons:
        raise StoreError(
            f"Another user can change the file in which measurements wait: {'; '.join(reasons)}. Look at it, then "
            "give it back to you (chown, chmod o-w) or remove it."
        )


def _records(lines: Iterable[bytes]) -> Left:
    trials, bests, unreadable = list[AnyTrial](), list[AnyBest](), 0
    for line in filter(None, lines):
        try:
            found = _record(line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable += 1
        else:
            (trials if isinstance(found, Trial) else bests).append(found)  # type: ignore[arg-type]
    return Left(tuple(trials), tuple(bests), unreadable)


def _record(line: bytes) -> Record:
    entry = json.loads(line)
    told = {name: entry[name] for name in ("document", "gpu")}
    if checksum_of(told) != entry[CHECKSUM]:
        raise ValueError("the line was changed")
    bests, trials = records_in(entry["document"])
    records: list[Record] = [*bests, *trials]
    (record,) = records
    return replace(record, device=replace(record.device, uuid=entry["gpu"]))


def _line(record: Record) -> bytes:
    bests, trials = ((), (record,)) if isinstance(record, Trial) else ((record,), None)
    told = {"document": document_from(record.device, bests, trials), "gpu": record.device.uuid}
    return (canonical_text(told | {CHECKSUM: checksum_of(told)}) + "\n").encode()


def _places(target: StoreTarget) -> Iterator[tuple[Path, str]]:
    """Yield the folders for spools of a store, and how their names begin there."""
    if target.path is not None:
        yield target.path.parent, f"{target.path.name}.spool-"
    state = state_directory()
    if state is not None:
        yield state, f"{hashlib.sha256(target.label.encode()).hexdigest()[:16]}.spool-"
