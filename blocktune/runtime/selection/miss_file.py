"""The file of misses: which shapes were called without a measurement of their own, on which device, and how often.

A line is {"calls": 3, "device": "nvidia h200|9.0|132", "shape": {...}}.
"""

from typing import Any

from blocktune.kernels.files.count_file import MAX_COUNT, CountFile, is_count, is_name
from blocktune.kernels.files.variables import MISSES
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape

Miss = tuple[str, AttentionShape]
"""`DeviceSpec.key` and shape."""


def _line(miss: Miss, calls: int) -> dict[str, Any]:
    device, shape = miss
    return {"calls": calls, "device": device, "shape": shape.to_json()}


def _parse_miss(document: dict[str, Any]) -> tuple[Miss, int]:
    device, calls = document["device"], document["calls"]
    if not is_name(device) or not is_count(calls) or not calls:
        raise UsageError(f"A miss must have a device and a count, but got {device!r:.100} and {calls!r:.100}.")
    return (device, AttentionShape.from_json(document["shape"])), calls


_FILE: CountFile[Miss, int] = CountFile(
    variable=MISSES,
    noun="misses",
    to_json=_line,
    from_json=_parse_miss,
    plus=lambda one, other: min(one + other, MAX_COUNT),
    frequency=int,
)
miss_path, append_misses, read_misses = _FILE.path, _FILE.append, _FILE.read
