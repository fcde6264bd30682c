"""Times `tune run` from empty caches, as a user starts it: one shape at a time, and a grid of 24 on one GPU.

python -m tools.bench.cold_searches results/h200.cold-searches.table.json [forward decoding backward grid]

Every run has a store, a compile cache and a Triton cache of its own. The file is written after every run; a run that is
measured again takes the place of its earlier row.
"""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktune.db.exchange.document import save_text
from tests.support.ranks.document import new_document, table

RUNS = {
    "forward": "--seq 3000 --dim 128 --batch 4 --heads 16 --causal",
    "decoding": "--seq 1 --seq-k 9000 --dim 128 --batch 8 --heads 32 --kv-heads 8",
    "backward": "--seq 3000 --dim 128 --batch 4 --heads 16 --causal --direction backward",
    "grid": "--grid 'seq=512,1024,2048,4096,8192,16384 dim=64,128 causal=0,1'",
}
HOW = (
    "`tune run` from empty caches and without a store, from the start of its process to its end, on "
    f"{len(os.sched_getaffinity(0))} processors. `search` and `finals` say after how many seconds the first of each "
    "began; `a shape` is the median of their reports."
)
PHASE = re.compile(r"\d+/\d+ (search|finals)")
"""How a line of progress begins."""

COLUMNS = ("arguments", "shapes", "configs", "search", "finals", "a shape", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that ended. reports: of its shapes, as JSON. search, finals: seconds until the first of each began."""

    reports: list[dict[str, Any]]
    search: float
    finals: float
    seconds: float

    def cells(self, name: str) -> list[str]:
        tried = sum(sum(report["outcomes"].values()) for report in self.reports)
        each = statistics.median(report["seconds"] for report in self.reports)
        times = (f"{seconds:.1f}" for seconds in (self.search, self.finals, each, self.seconds))
        return [f"`{RUNS[name]}`", str(len(self.reports)), str(tried), *times]


def cold_run(name: str) -> Run:
    """Return how a run went that finds nothing compiled and nothing stored."""
    begun: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/cache"}
        command = [sys.executable, "-P", "-m", "blocktune", "run", *shlex.split(RUNS[name])]
        command += ["--json", "--db", f"{folder}/results.db"]
        started = time.monotonic()
        with (
            open(f"{folder}/answer", "w+") as answer,
            subprocess.Popen(
                command, stdout=answer, stderr=subprocess.PIPE, text=True, env=os.environ | places
            ) as process,
        ):
            assert process.stderr is not None
            for line in process.stderr:
                seconds = time.monotonic() - started
                print(f"{seconds:6.1f} s  {line.rstrip()}", flush=True)
                if phase := PHASE.match(line):
                    begun.setdefault(phase[1], seconds)
        seconds = time.monotonic() - started
        found = json.loads(Path(f"{folder}/answer").read_text())
    return Run(reports=found.get("runs", [found]), **begun, seconds=seconds)


def main(file: Path, names: list[str]) -> None:
    rows = {}
    if file.exists():
        rows = {row[0]: row for row in json.loads(file.read_text())["rows"]}
    for name in names or list(RUNS):
        row = cold_run(name).cells(name)
        print(row, flush=True)
        rows[row[0]] = row
        document = table(new_document(torch.device("cuda")), HOW, COLUMNS, list(rows.values()))
        save_text(json.dumps(document, indent=1, sort_keys=True) + "\n", file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
