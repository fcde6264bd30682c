"""Searches that are killed while another process has their store locked: killed_locked.py FOLDER KILLS SEED

What such a search acknowledges waits in its spool, and is in the store after the next one has folded it in. Searches
and the holders of the lock are forked from a process that has done all of it once. Prints, as JSON, how many
measurements were acknowledged and how many of them were lost.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TextIO

from blocktune.db.recorder import Recorder, fold_left
from blocktune.db.store import ResultStore
from tests.support.stores.sample_records import sample_trials

LOCK_SECONDS = 0.1
"""How long a search waits for its store: short, so that it goes over to its spool soon."""
MOST_ACKNOWLEDGED, LATE_SECONDS = 30, 0.02


def fork_work(work: Callable[[int], None]) -> tuple[int, TextIO]:
    """Return a process that does some work, and what it says."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading)
    try:
        os.close(reading)
        work(writing)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def kill_process(child: int, said: TextIO) -> list[str]:
    """Kill a process, and return what it had still said."""
    os.kill(child, signal.SIGKILL)
    with said:
        lines = said.readlines()
    os.waitpid(child, 0)
    return lines


@contextmanager
def hold_lock(place: Path) -> Iterator[None]:
    """While another process holds the write lock: this one's own would be shared with those that it forks."""

    def hold(say: int) -> None:
        with closing(sqlite3.connect(place, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            os.write(say, b"locked\n")
            signal.pause()

    child, said = fork_work(hold)
    assert said.readline() == "locked\n"
    try:
        yield
    finally:
        kill_process(child, said)


def search(place: Path, first: int, say: int, count: int = 10**9) -> None:
    """Record trials with numbers of their own, and say each that was acknowledged."""
    trial = sample_trials(1)[0]
    with ResultStore.open(place, lock_timeout_seconds=LOCK_SECONDS) as store, Recorder(store) as recorder:
        for number in range(first, first + count):
            recorder.record(replace(trial, config=replace(trial.config, extra=(("n", number),))))
            os.write(say, f"{number}\n".encode())


def acknowledged_trials(place: Path, first: int, dice: random.Random) -> set[int]:
    """Return what a search acknowledged until it was killed."""
    with hold_lock(place):
        child, said = fork_work(lambda say: search(place, first, say))
        lines = list(islice(said, dice.randrange(1, MOST_ACKNOWLEDGED)))
        time.sleep(dice.uniform(0, LATE_SECONDS))
        lines += kill_process(child, said)
    return {int(line) for line in lines if line.endswith("\n")}


def stored_numbers(place: Path) -> set[object]:
    """Return the numbers of the trials in a store, with those that wait in spools."""
    with ResultStore.open(place) as store:
        fold_left(store)
        return {dict(trial.config.extra).get("n") for trial in store.trials()}


def main(folder: Path, kills: int, seed: int) -> None:
    with open(os.devnull, "w") as nowhere:
        search(folder / "warm.db", 0, nowhere.fileno(), count=1)
    dice, lost, total = random.Random(seed), 0, 0
    for number in range(kills):
        if number % 20 == 0:  # a store of its own for each 20, so that none grows large
            place, said = folder / f"{number}.db", set[int]()
            ResultStore.open(place).close()
        new = acknowledged_trials(place, 10_000 * (number + 1), dice)
        said, total = said | new, total + len(new)
        lost += len(new - stored_numbers(place))
        if number % 20 == 19 or number == kills - 1:  # nothing of the earlier ones may go later
            lost += len(said - stored_numbers(place))
    sys.stdout.write(json.dumps({"acknowledged": total, "lost": lost}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
