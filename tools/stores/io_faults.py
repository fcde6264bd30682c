"""A store whose disk fails at one call or from one call on: io_faults.py FOLDER ERRORS SEED

Each case is a forked process with a store of its own, in which a write, sync, truncation or read of the store's files
fails (io_faults.c, which the C compiler of the machine makes). Nothing that was acknowledged may be lost, nothing that
was never stored may appear, and the process ends well or with an error of blocktune's. Prints, as JSON, how many calls
failed, how the processes ended, and what went wrong.
"""

import ctypes
import errno
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blocktune.db.exchange.merging import Results
from blocktune.db.recorder import Recorder, fold_left
from blocktune.db.records.records import Trial
from blocktune.db.spool import left_files
from blocktune.db.store import ResultStore
from blocktune.db.tables.cleaning import Rules
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.values.errors import BlocktuneError
from blocktune.runtime.store_reader.store_file import SqliteRows
from tests.support.stores.sample_records import sample_trials, winner
from tools import program

SOURCE = Path(__file__).with_name("io_faults.c")
READS = 8
KINDS, ERRORS = (1, 2, 4, READS, 15), (errno.EIO, errno.ENOSPC)
MOST_CALLS_BEFORE = 60
SAYING = " measurements are lost"
"""What a search says at its end where neither the store nor any file took what it had measured."""

BEST = winner()
SOUND = 20
"""Trials of the store that the faults meet."""

Say = Callable[[object], None]


def trials(first: int, count: int) -> list[Trial]:
    """Return trials with these numbers."""
    trial = sample_trials(1)[0]
    numbers = range(first, first + count)
    return [replace(trial, config=replace(trial.config, extra=(("n", number),))) for number in numbers]


def record(place: Path, say: Say) -> None:
    with ResultStore.open(place) as store:
        for number, trial in enumerate(trials(1000, 5), 1000):
            store.record(trial)
            say(number)


def search(place: Path, say: Say) -> None:
    """What is acknowledged here may wait in a spool."""
    with ResultStore.open(place) as store, Recorder(store) as recorder:
        for number, trial in enumerate(trials(1000, 5), 1000):
            recorder.record(trial)
            say(number)


def merge(place: Path, say: Say) -> None:
    with ResultStore.open(place) as store:
        store.merge([Results(trials=tuple(trials(1000, 20)))], trust=True)
        for number in range(1000, 1020):
            say(number)


def upkeep(place: Path, say: Say) -> None:
    """Nothing of it may take a trial away."""
    with ResultStore.open(place) as store:
        store.back_up()
        store.clean(Rules(source_hashes={}, protocol=0), dry_run=False)
        assert store.health().rows["trial"] == SOUND


def read(place: Path, say: Say) -> None:
    with ResultStore.open_to_read(place) as store:
        assert len(store.trials()) == SOUND
        assert store.bests() == [BEST]


def dispatch(place: Path, say: Say) -> None:
    (row,) = SqliteRows(place).read(BEST.device)
    assert row["kernel_hash"] == BEST.kernel_hash


ACTIONS = (record, search, merge, upkeep, read, dispatch)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: `said` are the trials that it acknowledged, `failed` the calls that failed."""

    how: str
    said: tuple[int, ...]
    failed: int


def with_faults(action: Callable[[Path, Say], None], place: Path, dice: random.Random) -> Ended:
    """Return how an action ends in a process of its own in which one call fails, or all from one on."""
    before = int(MOST_CALLS_BEFORE * dice.random() ** 2)
    kind = READS if action in (read, dispatch) else dice.choice(KINDS)
    error, every = dice.choice(ERRORS), dice.random() < 0.3
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        library = ctypes.CDLL(None)
        how = "well"
        library.io_faults_arm(place.name.encode(), kind, before, error, every)
        try:
            action(place, lambda number: os.write(writing, f"said {number}\n".encode()))
        except BlocktuneError as caught:
            how = f"{type(caught).__name__}{SAYING if SAYING in str(caught) else ''}"
        except BaseException as caught:
            how = f"wrong: {''.join(traceback.format_exception(caught))[-400:]!r}"
        os.write(writing, f"failed {library.io_faults_count()}\nended {how}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        lines = [line.rstrip("\n").partition(" ")[::2] for line in stream]
    os.waitpid(child, 0)
    words = dict(lines)
    said = tuple(int(value) for name, value in lines if name == "said")
    return Ended(words.get("ended", "wrong: died"), said, int(words.get("failed", 0)))


def find_wrong(place: Path, ended: Ended) -> str:
    """Return what a fault did that it must not do; empty for nothing."""
    if ended.how.startswith("wrong"):
        return ended.how
    if left_files(StoreTarget(path=place)):
        with ResultStore.open(place) as store:
            fold_left(store)
    with closing(sqlite3.connect(place)) as connection:
        query = "SELECT config.document FROM trial JOIN config ON config.id = trial.config_id"
        found = {json.loads(document)["n"] for (document,) in connection.execute(query)}
        if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
            return "damaged"
    acknowledged = () if ended.how.endswith(SAYING) else ended.said
    lost = {*acknowledged, *range(1, SOUND + 1)} - found
    return f"lost: {sorted(lost)[:5]}" if lost else ""


def warm(sound: Path) -> None:
    """Do everything once without a fault, so that it is imported in all processes that are forked from here."""
    place = sound.with_name("warm.db")
    for action in ACTIONS:
        shutil.copyfile(sound, place)
        action(place, lambda number: None)


def main(folder: Path, errors: int, seed: int) -> None:
    """Run cases until so many calls have failed."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    dice, failed, ended, wrong = random.Random(seed), 0, Counter[str](), []
    sound = folder / "sound.db"
    with ResultStore.open(sound) as store:
        store.merge([Results(bests=(BEST,), trials=tuple(trials(1, SOUND)))], trust=True)
    warm(sound)
    number = 0
    while failed < errors:
        number += 1
        case = folder / f"case{number}"
        case.mkdir()
        place = case / "store.db"
        shutil.copyfile(sound, place)
        action = ACTIONS[number % len(ACTIONS)]
        found = with_faults(action, place, dice)
        failed += found.failed > 0
        ended[found.how.split(":")[0]] += found.failed > 0
        if rule := find_wrong(place, found):
            wrong.append(f"{action.__name__}: {rule}")
        shutil.rmtree(case)
    sys.stdout.write(json.dumps({"errors": failed, "ended": dict(ended), "wrong": wrong}))


def compile_library(folder: Path) -> Path:
    """Return the library of io_faults.c, made in a folder.

    Raises:
        FileNotFoundError: there is no C compiler.
    """
    library = folder / "io_faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True, timeout=120)
    return library


def run(folder: Path, errors: int, seed: int) -> dict[str, Any]:
    """Return what a run of this program in a process of its own prints, with the library in front of libc."""
    environment = os.environ | {"LD_PRELOAD": str(compile_library(folder))}
    command = [*program("stores.io_faults"), str(folder), str(errors), str(seed)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    if found.returncode:
        raise RuntimeError(found.stderr[-1000:])
    told: dict[str, Any] = json.loads(found.stdout)
    return told


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
