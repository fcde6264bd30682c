"""Counts by kind that any number of processes add up in one file: statistics, of which damage costs a line."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from blocktune.kernels.files.line_file import append_lines, file_named_by, parsed_lines, read_lines
from blocktune.kernels.files.variables import OptionalFile

MAX_BYTES = 1 << 20
MAX_KINDS = 1000
"""How many kinds stay, the most frequent, when the file is summed up: about 300 bytes each."""

MAX_COUNT = 1 << 53
MAX_NAME = 400
"""Characters of a name in a kind."""

Kind = TypeVar("Kind")
Count = TypeVar("Count")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountFile(Generic[Kind, Count]):
    """A file of lines, each a JSON object. Equal kinds are added up when they are read, and in the file itself when it
    has grown to its bound.

    variable: the environment variable that names the file. noun: what is counted, and the file's name without the
    variable. to_json: returns a line. from_json: parses one, and raises where a value is out of range. plus: adds
    counts. frequency: by which kinds stay.
    """

    variable: OptionalFile
    noun: str
    to_json: Callable[[Kind, Count], dict[str, Any]]
    from_json: Callable[[dict[str, Any]], tuple[Kind, Count]]
    plus: Callable[[Count, Count], Count]
    frequency: Callable[[Count], int]

    def path(self) -> Path | None:
        """Return the file that the variable names, or one in the user's state directory. None is nowhere: the variable
        says `off`, or the user has no home.

        Raises:
            UsageError: the variable names a home directory that is not known.
        """
        return file_named_by(self.variable, f"{self.noun}.jsonl")

    def append(self, path: Path, counts: Mapping[Kind, Count]) -> None:
        """Add counts to the file.

        Raises:
            BlockingIOError: another process writes at this moment.
            OSError: the place cannot be written.
        """
        append_lines(path, self._lines(counts.items()), MAX_BYTES, lambda content: self._lines(self._frequent(content)))

    def read(self, path: Path) -> dict[Kind, Count]:
        """Return the counts of all processes. Invalid lines are passed over; no file means no counts.

        Raises:
            StoreError: the file cannot be read.
        """
        return self._summed(read_lines(path, MAX_BYTES, self.noun, self.variable))

    def _lines(self, counts: Iterable[tuple[Kind, Count]]) -> bytes:
        return b"".join(json.dumps(self.to_json(kind, count)).encode() + b"\n" for kind, count in counts)

    def _frequent(self, content: bytes) -> list[tuple[Kind, Count]]:
        counts = self._summed(content).items()
        return sorted(counts, key=lambda item: self.frequency(item[1]), reverse=True)[:MAX_KINDS]

    def _summed(self, content: bytes) -> dict[Kind, Count]:
        total: dict[Kind, Count] = {}
        for kind, count in parsed_lines(content, self.from_json):
            total[kind] = self.plus(total[kind], count) if kind in total else count
        return total


def is_count(value: object) -> bool:
    """Return whether a value is a count that a line may hold."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_name(value: object) -> bool:
    """Return whether a value is a name that a line may hold."""
    return isinstance(value, str) and len(value) <= MAX_NAME
