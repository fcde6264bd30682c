"""A URL with several addresses: the one that answers is taken, and the one that takes over."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import StoreError
from tests.support.stores.postgres_server import PostgresServer, new_folder


@pytest.fixture
def standby(own_server: PostgresServer) -> Iterator[PostgresServer]:
    """A server that follows `own_server`, whose commits wait for it; both end with the test."""
    with new_folder() as folder:
        follower = PostgresServer(folder)
        follower.create_standby(own_server)
        follower.start()
        own_server.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()")
        try:
            yield follower
        finally:
            follower.stop()
            if not own_server.is_running:
                own_server.start()
            own_server.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


def url_of(first: Path, second: Path, database: str) -> str:
    return f"postgresql+psycopg://tester@/{database}?host={first},{second}"


def test_the_second_address_serves_where_the_first_is_away(
    own_server: PostgresServer, trial: Trial, tmp_path: Path
) -> None:
    own_server.create_database("second")
    with ResultStore.open(url_of(tmp_path, own_server.folder, "second")) as store:
        store.record(trial)
        assert store.trials() == [trial]
    with pytest.raises(StoreError, match="does not work"):
        ResultStore.open(url_of(tmp_path, tmp_path / "other", "second"))


@pytest.mark.exhaustive
def test_a_standby_that_takes_over_has_all_that_was_acknowledged(
    own_server: PostgresServer, standby: PostgresServer, trial: Trial
) -> None:
    own_server.create_database("taken_over")
    place = url_of(own_server.folder, standby.folder, "taken_over")
    acknowledged = []
    with ResultStore.open(place) as store:
        for number in range(20):
            if number == 10:
                own_server.stop("immediate")
                standby.promote()
            acknowledged.append(replace(trial, config=replace(trial.config, extra=(("number", number),))))
            store.record(acknowledged[-1])
        assert store.trials() == acknowledged


@pytest.mark.exhaustive
def test_a_standby_serves_readers_and_is_passed_over_by_writers(
    own_server: PostgresServer, standby: PostgresServer, trial: Trial
) -> None:
    own_server.create_database("read")
    both = url_of(standby.folder, own_server.folder, "read")
    with ResultStore.open(both) as store:
        store.record(trial)
    own_server.stop("immediate")
    with ResultStore.open_to_read(both) as store:
        assert store.trials() == [trial]
    with pytest.raises(StoreError, match="read-only"):
        ResultStore.open(both)
