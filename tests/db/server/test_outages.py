"""A server that is killed, restarted, full or away while it is written to: nothing that was acknowledged is lost."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables.sqlite_file import LOCK_TIMEOUT_SECONDS
from blocktune.kernels.values.errors import StoreError
from tests.support.stores.postgres_server import PostgresServer
from tools import program


def numbered(trial: Trial, number: int) -> Trial:
    return replace(trial, config=replace(trial.config, extra=(("number", number),)))


@contextmanager
def writers(
    count: int, place: str, document: Path, each: int, patience_seconds: float = LOCK_TIMEOUT_SECONDS
) -> Iterator[subprocess.Popen[bytes]]:
    """Start processes that write at once; the one that is yielded ends with 0 if all of them were served.

    What they say of a server that is away goes to a file: a pipe that is read at the end is full before. None outlives
    the block: a test that runs out of time would leave them all to the next one.
    """
    command = [*program("stores.herd"), "write", str(count), place, str(document), str(each), str(patience_seconds)]
    with said_in(document).open("w") as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as herd:
        try:
            yield herd
        finally:
            herd.kill()


def said_in(document: Path) -> Path:
    return document.with_suffix(".said")


def all_stored(place: str, count: int, each: int) -> bool:
    with ResultStore.open_to_read(place) as store:
        found = {(trial.config.parameters["writer"], trial.config.parameters["number"]) for trial in store.trials()}
    return found == {(writer, number) for writer in range(count) for number in range(each)}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.cluster  # not next to other tests: it takes all processors
@pytest.mark.parametrize(("count", "each", "stops"), [(8, 12, 2), (64, 20, 12)])
def test_writers_wait_for_a_server_that_is_killed_and_go_on(
    own_server: PostgresServer, document: Path, count: int, each: int, stops: int
) -> None:
    name = f"killed_{count}"
    place = own_server.create_database(name)
    ResultStore.open(place).close()

    def stored() -> int:
        (row,) = own_server.execute("SELECT count(*) FROM trial", database=name)
        return int(row[0])

    def served() -> int:
        with ResultStore.open_to_read(place) as store:
            return len({trial.config.parameters["writer"] for trial in store.trials()})

    with writers(count, place, document, each) as herd:
        until(lambda: herd.poll() is not None or served() == count)  # who was never served does not wait for a server
        for stop in range(stops):
            until(lambda least=stop * count * each // stops: herd.poll() is not None or stored() > least)
            own_server.stop("immediate")
            own_server.start()
        herd.wait(timeout=240)
    assert herd.returncode == 0, said_in(document).read_text()
    assert all_stored(place, count, each)


def test_a_search_goes_on_without_its_server(
    own_server: PostgresServer, trial: Trial, best: Best, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = own_server.create_database("searched")
    with ResultStore.open(place) as store, Recorder(store) as recorder:
        recorder.record(numbered(trial, 0))
        own_server.stop("immediate")
        try:
            recorder.record(numbered(trial, 1))  # waits in a file
        finally:
            own_server.start()
        recorder.record(numbered(trial, 2))
        assert recorder.set_best(best)
    with ResultStore.open_to_read(place) as store:
        assert sorted(each.config.parameters["number"] for each in store.trials()) == [0, 1, 2]
        assert store.bests() == [best]


def test_a_server_that_stays_away_is_given_up(own_server: PostgresServer, trial: Trial) -> None:
    place = own_server.create_database("away")
    with ResultStore.open(place, lock_timeout_seconds=0.5) as store:
        own_server.stop("fast")
        try:
            began = time.monotonic()
            with pytest.raises(StoreError, match="does not work"):
                store.record(trial)
            assert time.monotonic() - began < 20
        finally:
            own_server.start()
        store.record(trial)
        assert store.trials() == [trial]


@pytest.mark.timeout(600)  # two processors need minutes to import for 64 processes
@pytest.mark.parametrize(("count", "each"), [(16, 1), pytest.param(64, 50, marks=pytest.mark.exhaustive)])
def test_many_writers_share_the_few_connections_of_a_server(
    own_server: PostgresServer, document: Path, count: int, each: int
) -> None:
    place = own_server.create_database(f"full_{count}")
    ResultStore.open(place).close()
    own_server.stop("fast")
    own_server.settings["max_connections"] = "12"
    own_server.start()
    try:
        with writers(count, place, document, each, patience_seconds=480) as herd:
            herd.wait(timeout=560)
    finally:
        own_server.stop("fast")
        del own_server.settings["max_connections"]
        own_server.start()
    assert herd.returncode == 0, said_in(document).read_text()
    assert all_stored(place, count, each)
