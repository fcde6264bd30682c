"""A tuning run that is killed again and again, until it has ended: killed_runs.py FOLDER KILLS SEED

The runs are forked from one process that has imported everything. They search a whole synthetic landscape; FOLDER/log
gets a line when a config was measured and one when the store has acknowledged its trial. Prints, as JSON, how many runs
were killed and which winners the runs that ended have found.
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
from pathlib import Path
from typing import Any, ClassVar

from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.search import tune as tuning
from tests.support import landscape

LONGEST_SECONDS = 0.6
"""A run that nobody kills takes some times as long."""


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


def forked(place: Path, log: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run(place, log)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def check(place: Path, lines: list[str]) -> None:
    """Nothing that was acknowledged is lost, and nothing that was acknowledged is measured again."""
    acknowledged: set[str] = set()
    for line in lines:
        event, _, label = line.partition(" ")
        assert event == "stored" or label not in acknowledged, f"{label} was measured twice"
        if event == "stored":
            acknowledged.add(label)
    if not acknowledged:
        return
    with closing(sqlite3.connect(f"{place.as_uri()}?mode=ro", uri=True)) as connection:
        query = "SELECT config.document FROM trial JOIN config ON config.id = trial.config_id"
        stored = {KernelConfig.from_json(json.loads(row[0])).label for row in connection.execute(query)}
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
    assert acknowledged <= stored, f"lost: {acknowledged - stored}"


def winner(place: Path) -> Any:
    with ResultStore.open(place, read_only=True) as store:
        best = store.best(landscape.DEVICE, landscape.SHAPE)
        assert best is not None
        return best.config.label, best.trials


def main(folder: Path, kills: int, seed: int) -> None:
    registry.KERNELS = {"pointers": SmallKernel("pointers")}
    dice, killed, winners = random.Random(seed), 0, []
    place, log_path = folder / "0.db", folder / "0.log"
    while True:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        child = forked(place, log)
        os.close(log)
        if killed < kills:
            time.sleep(dice.uniform(0, LONGEST_SECONDS))
            os.kill(child, signal.SIGKILL)  # harmless if it has ended: nobody has waited for it yet
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        check(place, log_path.read_text().splitlines())
        if status == -signal.SIGKILL:
            killed += 1
            continue
        assert status == 0, status
        winners.append(winner(place))
        if killed == kills:
            break
        place, log_path = folder / f"{killed}.db", folder / f"{killed}.log"
    sys.stdout.write(json.dumps({"killed": killed, "winners": winners}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
