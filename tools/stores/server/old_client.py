"""Clients of an older version, whose checkout comes first on the path: old_client.py DOCUMENT

Reads the places of stores from its standard input. It makes each, takes the document in, and prints `made`. Then it
forks clients that write and read until the store refuses them, and prints as JSON, once all have ended, which trials
were acknowledged and how each ended. It is a file of today, so it uses only what both versions have.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from blocktune.db.exchange.importing import records_from
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import BlocktuneError

WRITERS, READERS = 3, 1
READ_SECONDS = 4.0
"""How long a reader goes on: nothing refuses it."""


def fork_work(work: Callable[[], Iterator[Any]]) -> tuple[int, IO[str]]:
    """Return a process that does a piece of work, and a file of what that yields: a JSON line for each, and last how it
    ended, unless it ended well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading)
    try:
        with os.fdopen(writing, "w", buffering=1) as said:
            try:
                for each in work():
                    said.write(f"{json.dumps(each)}\n")
            except BlocktuneError as error:
                said.write(f"{json.dumps(type(error).__name__)}\n")
            except BaseException as error:
                said.write(f"{json.dumps(f'{type(error).__name__}: {error!s:.300}')}\n")
    finally:
        os._exit(0)


def write_trials(place: str, trial: Any, writer: int) -> Iterator[list[int]]:
    """Yield the trials of a writer as they are acknowledged."""
    with ResultStore.open(place) as store:
        for number in range(1_000_000):
            own = (("number", number), ("writer", writer))
            store.record(replace(trial, config=replace(trial.config, extra=own)))
            yield [writer, number]


def read(place: str) -> Iterator[int]:
    """Yield how many trials there are."""
    ends_at = time.monotonic() + READ_SECONDS
    with ResultStore.open_to_read(place) as store:
        while time.monotonic() < ends_at:
            yield len(store.trials())
            time.sleep(0.02)


def client_lines(client: tuple[int, IO[str]]) -> list[Any]:
    """Return what a client has said, once it has ended. The last line of a killed one may be torn, and is none."""
    process, file = client
    with file:
        lines = [line for line in file if line.endswith("\n")]
    os.waitpid(process, 0)
    return [json.loads(line) for line in lines]


def main(document: Path) -> None:
    trial = records_from(json.loads(document.read_text()))[1][0]
    for line in sys.stdin:
        place = line.strip()
        with ResultStore.open(place) as store:
            store.import_json(json.loads(document.read_text()), trust=True)
        print("made", flush=True)
        writers = [fork_work(partial(write_trials, place, trial, number)) for number in range(WRITERS)]
        readers = [fork_work(partial(read, place)) for _ in range(READERS)]
        said = {"writers": [*map(client_lines, writers)], "readers": [*map(client_lines, readers)]}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
