"""Many processes on one store, and processes that are killed."""

import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import StoreLockedError
from tools import program

PROCESSES = 16
FULL = os.environ.get("BLOCKTUNE_FAULTS") == "full"
"""With the full counts a test takes half a minute; `make fault-test` sets it."""

Worker = subprocess.Popen[str]


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Starts a worker of tools/stores/store_worker.py; none outlives the test."""
    with ExitStack() as stack:

        def run(*arguments: object) -> Worker:
            command = [*program("stores.store_worker"), *map(str, arguments)]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(worker)
            stack.callback(worker.kill)
            return worker

        yield run


@pytest.fixture
def document(trial: Trial, tmp_path: Path) -> Path:
    """A file with the trial that writers vary."""
    file = tmp_path / "trial.json"
    save_document(document_from(trial.device, [], [trial]), file)
    return file


def herd(*arguments: object) -> None:
    """Runs many processes at once, all of which have to end well; see tools/stores/herd.py."""
    command = [*program("stores.herd"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(params=["sqlite", "postgresql"])
def new_places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], list[str]]:
    """Makes places for stores that are not there yet."""
    if request.param == "sqlite":
        return lambda count: [str(tmp_path / f"store{number}.db") for number in range(count)]
    make = request.getfixturevalue("new_postgres_database")
    return lambda count: [make() for _ in range(count)]


@pytest.mark.few(1)
def test_processes_create_one_store_together(new_places: Callable[[int], list[str]]) -> None:
    herd("create", PROCESSES, *new_places(30 if FULL else 2))


@pytest.mark.few(1)
def test_no_write_of_many_processes_is_lost(target: str, document: Path) -> None:
    each = 100 if FULL else 5
    herd("write", PROCESSES, target, document, each)
    with ResultStore.open(target) as store:
        found = sorted(
            (trial.config.parameters["writer"], trial.config.parameters["number"]) for trial in store.trials()
        )
        assert found == [(writer, number) for writer in range(PROCESSES) for number in range(each)]
        assert store.health().rows["environment"] == 1


@pytest.mark.few(1)
def test_readers_see_whole_trials_while_others_write(
    store: ResultStore, target: str, start: Callable[..., Worker], document: Path, trial: Trial
) -> None:
    writer = start("write", target, document, 0, 40)
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()
    seen = [0]
    while writer.poll() is None:
        trials = store.trials(trial.device, trial.shape)
        assert {found.samples_us for found in trials} <= {trial.samples_us}
        seen.append(len(trials))
    assert seen == sorted(seen)
    assert len(store.trials()) == 40


@pytest.mark.few(1)
def test_a_killed_writer_loses_nothing_that_was_acknowledged(
    target: str, start: Callable[..., Worker], document: Path
) -> None:
    randomness = random.Random(0)
    for writer in range(50 if FULL else 3):
        worker = start("write", target, document, writer, 100_000)
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        worker.stdin.write("go\n")
        worker.stdin.flush()
        worker.stdout.readline()
        time.sleep(randomness.uniform(0, 0.15))
        worker.kill()
        acknowledged = 1 + len(worker.stdout.read().splitlines())
        with ResultStore.open(target) as store:
            own = [trial for trial in store.trials() if trial.config.parameters["writer"] == writer]
            # The last one may have been committed without having been acknowledged any more.
            assert acknowledged <= len(own) <= acknowledged + 1
            assert store.health().sound


def test_a_creator_that_was_killed_leaves_a_store_that_can_be_made(path: Path) -> None:
    path.touch()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    with ResultStore.open(path) as store:
        assert store.health().rows["trial"] == 0


def test_a_lock_that_is_kept_is_reported_in_time(
    sqlite_store: ResultStore, path: Path, start: Callable[..., Worker], trial: Trial
) -> None:
    sqlite_store.record(trial)
    holder = start("hold", path)
    assert holder.stdout is not None
    holder.stdout.readline()
    began = time.monotonic()
    with ResultStore.open(path, lock_timeout_seconds=0.3) as impatient:
        assert impatient.trials() == [trial]  # readers do not wait
        with pytest.raises(StoreLockedError, match="locked for the whole timeout"):
            impatient.record(trial)
    assert 0.3 <= time.monotonic() - began < 20  # other writers wait 30 s
    holder.communicate("")
    sqlite_store.record(trial)


def test_a_lock_on_a_server_is_reported_in_time(new_postgres_database: Callable[[], str], trial: Trial) -> None:
    from sqlalchemy import create_engine, text
    from sqlalchemy.pool import NullPool

    from blocktune.db.tables.engine import WRITER_LOCK

    place = new_postgres_database()
    with ResultStore.open(place, lock_timeout_seconds=0.3) as impatient:
        with create_engine(place, poolclass=NullPool).begin() as holder:
            holder.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITER_LOCK})
            assert impatient.trials() == []
            with pytest.raises(StoreLockedError, match="locked for the whole timeout"):
                impatient.record(trial)
        impatient.record(trial)
