"""Commands on files that have no end, fill the memory, or wait: endless_files.py FOLDER COMMANDS SEED

A command has to end in 5 s with a code of the list and in words, or say at once what it waits for. Prints, as JSON, how
the commands ended and which broke a rule.
"""

import gzip
import json
import os
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from blocktune.cli.main import app
from tests.support.command_line import CliRunner
from tests.support.stores.odd_values import odd_file
from tools.stores.cli_fuzz import broken_rule

MAX_SECONDS, MAX_WAIT_SECONDS = 5.0, 60.0
"""Of the processor, and of the clock: a busy machine holds every command up, and one that waits takes no processor."""

MEMORY_BYTES = 4 << 30
"""More than a command may take while it reads."""

SHAPE = "--seq 8192 --dim 64 --device h200"
COMMANDS = (
    *("list --db FILE", "doctor --db FILE", "doctor --recover --db FILE", "doctor --restore --db FILE"),
    *("doctor --drill --db FILE", "gc --db FILE", "kernels --db FILE", "verify --db FILE", f"best {SHAPE} --db FILE"),
    *("export - --device h200 --db FILE", "merge FILE", "import FILE", "import JSON --db FILE", "diff FILE FILE"),
    *("freeze --verify FILE FILE", "freeze out.json --device h200 --sign FILE", "report FILE --out out.html"),
    *("report --out out.html --against FILE", "run --shapes FILE --device h200", f"profile {SHAPE} --from FILE"),
    *("lab replay FILE", "lab replay --untuned --winners FILE", "lab rematch FILE FILE", "lab sweeps show FILE"),
    *("lab calibrate FILE --out out.json", "lab record out --shapes FILE"),
)
"""26 commands with a file that they read."""


@cache
def _compress() -> bytes:
    return gzip.compress(bytes(1 << 30), 1)


def _bomb(folder: Path, suffix: str) -> Path:
    """A gzip file of 20 MB that unpacks to 20 GB."""
    path, part = folder / f"bomb{suffix}", _compress()
    with path.open("wb") as file:
        for _ in range(20):
            file.write(part)
    return path


def _random(folder: Path, suffix: str) -> Path:
    path = folder / f"random{suffix}"
    path.symlink_to("/dev/urandom")
    return path


def _memory(folder: Path, suffix: str) -> Path:
    path = folder / f"memory{suffix}"
    path.symlink_to("/proc/self/mem")
    return path


def _loop(folder: Path, suffix: str) -> Path:
    path = folder / f"loop{suffix}"
    path.symlink_to(path.name)
    return path


def _line(folder: Path, suffix: str) -> Path:
    """One line of 60 MB, which fits the bound of a document."""
    path = folder / f"line{suffix}"
    path.write_text("[" + "1," * (30 << 20))
    return path


SOURCES: dict[str, Callable[[Path, str], Path]] = {
    **{
        kind: lambda folder, suffix, kind=kind: odd_file(folder, kind, suffix)  # type: ignore[misc]
        for kind in ("pipe", "socket", "endless", "kernel log", "sparse", "directory", "nested")
    },
    "bomb": _bomb,
    "random": _random,
    "memory": _memory,
    "loop": _loop,
    "line": _line,
}
SUFFIXES = {"list": ".db", "lab": ".sweep.json.gz", "profile": ".counters.csv", "run": ".toml", "doctor": ".db"}


def judge_command(line: str, source: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Return how a command ended on a source, and which rule it broke."""
    suffix, place = SUFFIXES.get(line.split()[0], ".json"), folder / source
    place.mkdir()
    path = SOURCES[source](place, suffix)
    words = [str(path) if word == "FILE" else word.replace("JSON", "some.json") for word in line.split()]
    began, used = time.monotonic(), time.process_time()
    result = CliRunner().invoke(app, words, env=environment)
    waited, used = time.monotonic() - began, time.process_time() - used
    shutil.rmtree(place)  # a recovery leaves a store in the place of the source
    late = f"{used:.1f} s, {waited:.1f} s" if used > MAX_SECONDS or waited > MAX_WAIT_SECONDS else ""
    return result.exit_code, broken_rule(words, result, 0.0) or late


def main(folder: Path, commands: int, seed: int) -> None:
    del seed  # every source is tried
    os.chdir(folder)
    Path("some.json").write_text("{}")
    environment = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    ended, broken = Counter[int](), list[dict[str, Any]]()
    judge_command(f"best {SHAPE}", "socket", folder, environment)  # what is imported once takes its time
    for line in COMMANDS[:commands]:
        for source in SOURCES:
            code, rule = judge_command(line, source, folder, environment)
            ended[code] += 1
            if rule:
                broken.append({"words": f"{line} of {source}", "rule": rule})
    most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    if most_mib > MEMORY_BYTES >> 20:
        broken.append({"words": "all", "rule": f"{most_mib:,} MiB"})
    sys.stdout.write(json.dumps({"ended": dict(ended), "broken": broken, "most_mib": most_mib}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
