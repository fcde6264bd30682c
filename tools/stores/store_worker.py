"""A process that uses a store, for tests that need several or that kill one.

    store_worker.py write  PLACE DOCUMENT WRITER COUNT     records COUNT trials; prints a number when it is acknowledged
    store_worker.py hold   PLACE                           keeps the write lock until its standard input ends

A writer says `ready` and waits for a line before it begins.
"""

import json
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from blocktune.db.exchange.importing import records_from
from blocktune.db.store import ResultStore


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def wait_for_start() -> None:
    say("ready")
    sys.stdin.readline()


def write(place: str, document: str, writer: str, count: str) -> None:
    _, trials = records_from(json.loads(Path(document).read_text()))
    wait_for_start()
    with ResultStore.open(place) as store:
        for number in range(int(count)):
            own = (("writer", int(writer)), ("number", number))
            store.record(replace(trials[0], config=replace(trials[0].config, extra=own)))
            say(number)


def hold(place: str) -> None:
    with closing(sqlite3.connect(place, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        say("ready")
        sys.stdin.read()


if __name__ == "__main__":
    {"write": write, "hold": hold}[sys.argv[1]](*sys.argv[2:])
