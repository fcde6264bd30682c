"""How often kinds of calls were launched, by all processes of this user: `tune kernels` shows it next to the winners.

A process adds its counts to a file when it ends, one JSON object per line: {"device": "nvidia h200|9.0|132", "kernel":
"module:function", "problem": "{...}", "hits": 7, "misses": 1, "seconds": 2.5}. Equal kinds are added up when they are
read. The counts are statistics: damage costs a line, never a launch.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from blocktune.kernels.files.line_file import append_lines, file_named_by, parsed_lines, read_lines
from blocktune.kernels.files.variables import LAUNCHES
from blocktune.kernels.tuned.config import Problem
from blocktune.kernels.values.errors import UsageError

MAX_BYTES = 1 << 20
MAX_KINDS = 1000
"""How many kinds stay, the most frequent, when the file is summed up."""

MAX_COUNT = 1 << 53
_MAX_NAME = 400


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that are tuned together. device: `DeviceSpec.key`. problem: without the list of configs."""

    device: str
    kernel: str
    problem: Problem


@dataclass(frozen=True, slots=True)
class Launches:
    """hits: launches with a config that was known. misses: those that had none yet. seconds: what measuring took."""

    hits: int = 0
    misses: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Launches") -> "Launches":
        return Launches(self.hits + other.hits, self.misses + other.misses, self.seconds + other.seconds)

    def __bool__(self) -> bool:
        return any(astuple(self))


def launches_path() -> Path | None:
    """Return BLOCKTUNE_LAUNCHES, or `blocktune/launches.jsonl` in the user's state directory; None where the variable
    says `off`, or the user has no home.

    Raises:
        UsageError: the variable names a home directory that is not known.
    """
    return file_named_by(LAUNCHES, "launches.jsonl")


def append_launches(path: Path, counts: Mapping[Kind, Launches]) -> None:
    """Add counts to the file.

    Raises:
        OSError: the place cannot be written, or another process writes at this moment.
    """
    append_lines(path, _lines(counts.items()), MAX_BYTES, lambda content: _lines(_most_frequent(_summed(content))))


def read_launches(path: Path) -> dict[Kind, Launches]:
    """Return the counts of all processes. Invalid lines are passed over; no file means no launches.

    Raises:
        StoreError: the file cannot be read.
    """
    return _summed(read_lines(path, MAX_BYTES, "launches", LAUNCHES))


def _lines(counts: Iterable[tuple[Kind, Launches]]) -> bytes:
    return b"".join(_line(kind, launches) for kind, launches in counts)


def _line(kind: Kind, launches: Launches) -> bytes:
    named = {"device": kind.device, "kernel": kind.kernel, "problem": kind.problem.document}
    return json.dumps(named | asdict(launches)).encode() + b"\n"


def _most_frequent(counts: Mapping[Kind, Launches]) -> list[tuple[Kind, Launches]]:
    return sorted(counts.items(), key=lambda item: item[1].hits, reverse=True)[:MAX_KINDS]


def _summed(content: bytes) -> dict[Kind, Launches]:
    total: dict[Kind, Launches] = {}
    for kind, launches in parsed_lines(content, _parsed):
        total[kind] = total.get(kind, Launches()) + launches
    return total


def _parsed(document: Mapping[str, Any]) -> tuple[Kind, Launches]:
    """Return the kind and the counts of a line.

    Raises:
        UsageError: a value is out of range.
    """
    device, kernel = document["device"], document["kernel"]
    hits, misses, seconds = document["hits"], document["misses"], document["seconds"]
    if not all(isinstance(name, str) and len(name) <= _MAX_NAME for name in (device, kernel)):
        raise UsageError(
            f"A line of launches must name a device and a kernel, but got {device!r:.100}, {kernel!r:.100}."
        )
    counted = all(type(count) is int and 0 <= count <= MAX_COUNT for count in (hits, misses))
    if not counted or not 0 <= seconds <= MAX_COUNT:
        raise UsageError(f"Counts of launches are out of range: {hits!r:.50}, {misses!r:.50} in {seconds!r:.50} s.")
    return Kind(device, kernel, Problem.from_document(document["problem"])), Launches(hits, misses, float(seconds))
