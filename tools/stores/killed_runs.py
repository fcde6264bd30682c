"""A tuning run that is killed again and again, until it has ended: killed_runs.py FOLDER KILLS SEED

The runs are forked from one process that has done one already, so that all of their time goes into searching. They
search a whole synthetic landscape, and say when a config was measured and when the store has acknowledged its trial.
Most are killed right after one of these lines, so that rows are at stake, the others at any moment from their start on.
Prints, as JSON, how many runs were killed, how many trials were acknowledged, and which winners the runs that came to
their end have found.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TextIO

from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.search import tune as tuning
from tests.support.models import landscape

EARLY, EARLY_SECONDS = 0.3, 0.1
"""The share of runs that are killed at a moment of their start, and how long that lasts."""
MOST_LINES, LATE_SECONDS = 24, 0.02
"""Of the others: how many lines they say at most, and how long after the last one they are killed."""


class SmallKernel(landscape.LandscapeKernel):
    """So that a run has an end."""

    parameters = landscape.LandscapeKernel.parameters | {"num_stages": (2, 3)}


class LoggedRunner(ReplayRunner):
    """Says what it has measured."""

    def __init__(self, log: int) -> None:
        super().__init__(landscape.measurements(0))
        self._log = log

    def measure(self, config: KernelConfig) -> Measurement:
        os.write(self._log, f"measured {config.label}\n".encode())
        return super().measure(config)


class LoggedRecorder(Recorder):
    """Says what it has acknowledged."""

    log: ClassVar[int]

    def record(self, trial: Trial) -> None:
        super().record(trial)
        os.write(self.log, f"stored {trial.config.label}\n".encode())


def run(place: Path, log: int) -> None:
    LoggedRecorder.log = log
    tuning.Recorder = LoggedRecorder
    with ResultStore.open(place) as store:
        tuning.tune(
            landscape.SHAPE,
            device=landscape.DEVICE,
            store=store,
            exhaustive=True,
            compiler=landscape.InstantCompiler(),
            runner=LoggedRunner(log),
        )


def fork_run(place: Path) -> tuple[int, TextIO]:
    """Return the process that runs, and what it says."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading)
    status = 1
    try:
        os.close(reading)
        run(place, writing)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def life(place: Path, dice: random.Random | None) -> tuple[int, list[str]]:
    """Return how a run ended and what it had said. Without dice it is not killed."""
    child, said = fork_run(place)
    with said:
        lines = []
        if dice is not None:
            if dice.random() < EARLY:
                time.sleep(dice.uniform(0, EARLY_SECONDS))
            else:
                lines = list(islice(said, dice.randrange(1, MOST_LINES)))
                time.sleep(dice.uniform(0, LATE_SECONDS))
            os.kill(child, signal.SIGKILL)  # harmless if it has ended: its status was not taken yet
        lines += said
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), [line.rstrip("\n") for line in lines]


def check(place: Path, lines: list[str]) -> int:
    """Nothing that was acknowledged is lost, and nothing that was acknowledged is measured again.

    Returns how many trials were acknowledged.
    """
    acknowledged: set[str] = set()
    for line in lines:
        event, _, label = line.partition(" ")
        assert event == "stored" or label not in acknowledged, f"{label} was measured twice"
        if event == "stored":
            acknowledged.add(label)
    if not acknowledged:
        return 0
    with closing(sqlite3.connect(f"{place.as_uri()}?mode=ro", uri=True)) as connection:
        query = "SELECT config.document FROM trial JOIN config ON config.id = trial.config_id"
        stored = {KernelConfig.from_json(json.loads(row[0])).label for row in connection.execute(query)}
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
    assert acknowledged <= stored, f"lost: {acknowledged - stored}"
    return len(acknowledged)


def winner(place: Path) -> Any:
    with ResultStore.open(place, read_only=True) as store:
        best = store.best(landscape.DEVICE, landscape.SHAPE)
        assert best is not None
        return best.config.label, best.trials


def warm(place: Path) -> None:
    """Do what every run does, so that it is imported and compiled in all that are forked from here."""
    with open(os.devnull, "w") as nowhere:
        run(place, nowhere.fileno())


def main(folder: Path, kills: int, seed: int) -> None:
    registry.KERNELS = {"pointers": SmallKernel("pointers")}
    warm(folder / "warm.db")
    dice, killed, acknowledged, winners = random.Random(seed), 0, 0, []
    place, lines = folder / "0.db", list[str]()
    while True:
        status, said = life(place, dice if killed < kills else None)
        lines += said
        known = check(place, lines)
        if status == -signal.SIGKILL:
            killed += 1
            continue
        assert status == 0, status
        winners.append(winner(place))
        acknowledged += known
        if killed == kills:
            break
        place, lines = folder / f"{killed}.db", []
    sys.stdout.write(json.dumps({"killed": killed, "acknowledged": acknowledged, "winners": winners}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
