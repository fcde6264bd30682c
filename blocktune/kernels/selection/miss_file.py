"""The file of misses: which shapes were called without a measurement of their own, on which device, and how often.

One JSON object per line: {"calls": 3, "device": "nvidia h200|9.0|132", "shape": {...}}. Any number of processes add
lines; those of equal device and shape are added up when they are read, and in the file itself when it has grown to its
bound. The counts are statistics: damage costs a line, never a call.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from blocktune.kernels.files.line_file import append_lines, file_named_by, parsed_lines, read_lines
from blocktune.kernels.files.variables import MISSES
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape

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
    return file_named_by(MISSES, "misses.jsonl")


def append_misses(path: Path, counts: Mapping[Miss, int]) -> None:
    """Add lines to the file.

    Raises:
        BlockingIOError: another process writes at this moment.
        OSError: the place cannot be written.
    """
    append_lines(
        path, _lines(counts.items()), MAX_BYTES, lambda content: _lines(_summed(content).most_common(MAX_KINDS))
    )


def read_misses(path: Path) -> Counter[Miss]:
    """Return how often each shape was missed on each device. Invalid lines are passed over; no file means no misses.

    Raises:
        StoreError: the file cannot be read.
    """
    return _summed(read_lines(path, MAX_BYTES, "misses", MISSES))


def _lines(counts: Iterable[tuple[Miss, int]]) -> bytes:
    return b"".join(_line(miss, calls) for miss, calls in counts)


def _line(miss: Miss, calls: int) -> bytes:
    device, shape = miss
    return json.dumps({"calls": calls, "device": device, "shape": shape.to_json()}).encode() + b"\n"


def _summed(content: bytes) -> Counter[Miss]:
    total: Counter[Miss] = Counter()
    for miss, calls in parsed_lines(content, _parsed):
        total[miss] = min(total[miss] + calls, MAX_CALLS)
    return total


def _parsed(document: dict[str, object]) -> tuple[Miss, int]:
    device, calls = document["device"], document["calls"]
    if not isinstance(device, str) or len(device) > _MAX_DEVICE or type(calls) is not int or not 0 < calls <= MAX_CALLS:
        raise UsageError(f"A miss must have a device and a count, but got {device!r:.100} and {calls!r:.100}.")
    return (device, AttentionShape.from_json(document["shape"])), calls  # type: ignore[arg-type]
