"""A PostgreSQL server is killed and started again, over and over, while processes write to it."""

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.store import ResultStore
from tests.support.stores.postgres_server import running_server
from tests.support.stores.sample_records import sample_trials
from tools import program

WRITERS = 8
SETTLED_SECONDS = 10.0
"""After the last stop, within which every writer has to be at work again."""


def server_stops(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """A PostgreSQL server is killed and started again while processes write to it."""
    dice, document = random.Random(seed), folder / "trial.json"
    trial = sample_trials(1)[0]
    save_document(document_from(trial.device, [], [trial]), document)
    with running_server() as server:
        place = server.create_database("stopped")
        ResultStore.open(place).close()
        writers = [_writer(folder, place, document, number) for number in range(WRITERS)]
        while not all(_said_numbers(folder, number) for number in range(WRITERS)):
            time.sleep(0.05)
        for _ in range(tried):
            time.sleep(dice.uniform(0.2, 2.0))
            server.stop("immediate")
            server.start()
        time.sleep(SETTLED_SECONDS)
        ended = [number for number, writer in enumerate(writers) if writer.poll() is not None]
        said = {pair for number, writer in enumerate(writers) for pair in _end_writer(folder, number, writer)}
        with ResultStore.open(place) as store:
            parameters = [each.config.parameters for each in store.trials()]
        stored = {(each["writer"], each["number"]) for each in parameters}
    why = "".join(f"; {(folder / f'error.{number}').read_text()[-300:]}" for number in ended)
    return len(said - stored), len(ended), f"{len(said)} measurements of {WRITERS} writers were acknowledged{why}"


def _writer(folder: Path, place: str, document: Path, number: int) -> subprocess.Popen[str]:
    command = [*program("stores.store_worker"), "write", place, str(document), str(number), "1000000"]
    with (folder / f"said.{number}").open("w") as said, (folder / f"error.{number}").open("w") as error:
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=error, text=True)
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()
    return writer


def _said_numbers(folder: Path, number: int) -> list[int]:
    """Return the numbers of the trials that a writer has acknowledged so far."""
    lines = (folder / f"said.{number}").read_text().splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith("\n") and line.strip().isdecimal()]


def _end_writer(folder: Path, number: int, writer: subprocess.Popen[str]) -> Iterator[tuple[int, int]]:
    """End a writer, and yield its trials."""
    writer.kill()
    writer.communicate()
    yield from ((number, said) for said in _said_numbers(folder, number))
