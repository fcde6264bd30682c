"""How often kinds of calls were launched, by all processes of this user: `tune kernels` shows it next to the winners.

A process adds its counts to a file when it ends. A line is {"device": "nvidia h200|9.0|132", "kernel":
"module:function", "problem": "{...}", "hits": 7, "misses": 1, "seconds": 2.5}.
"""

from dataclasses import asdict, astuple, dataclass
from typing import Any

from blocktune.kernels.files.count_file import MAX_COUNT, CountFile, is_count, is_name
from blocktune.kernels.files.variables import LAUNCHES
from blocktune.kernels.values.errors import UsageError
from blocktune.runtime.autotuned.config import LaunchProblem


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that are tuned together. device: `DeviceSpec.key`. problem: without the list of configs."""

    device: str
    kernel: str
    problem: LaunchProblem


@dataclass(frozen=True, slots=True)
class Launches:
    """hits: launches with a config that was known. misses: those that had none yet. seconds: what measuring took."""

    hits: int = 0
    misses: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Launches") -> "Launches":
        hits, misses = min(self.hits + other.hits, MAX_COUNT), min(self.misses + other.misses, MAX_COUNT)
        return Launches(hits, misses, self.seconds + other.seconds)

    def __bool__(self) -> bool:
        return any(astuple(self))


def _line(kind: Kind, launches: Launches) -> dict[str, Any]:
    return {"device": kind.device, "kernel": kind.kernel, "problem": kind.problem.document} | asdict(launches)


def _parsed(document: dict[str, Any]) -> tuple[Kind, Launches]:
    device, kernel = document["device"], document["kernel"]
    hits, misses, seconds = document["hits"], document["misses"], document["seconds"]
    if not is_name(device) or not is_name(kernel):
        raise UsageError(
            f"A line of launches must name a device and a kernel, but got {device!r:.100}, {kernel!r:.100}."
        )
    if not is_count(hits) or not is_count(misses) or not 0 <= seconds <= MAX_COUNT:
        raise UsageError(f"Counts of launches are out of range: {hits!r:.50}, {misses!r:.50} in {seconds!r:.50} s.")
    return Kind(device, kernel, LaunchProblem.from_document(document["problem"])), Launches(
        hits, misses, float(seconds)
    )


_FILE: CountFile[Kind, Launches] = CountFile(
    variable=LAUNCHES,
    noun="launches",
    to_json=_line,
    from_json=_parsed,
    plus=Launches.__add__,
    frequency=lambda launches: launches.hits,
)
launches_path, append_launches, read_launches = _FILE.path, _FILE.append, _FILE.read
