"""A database server that is silent, drops connections or is restarted."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, make_url

from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables import server, waiting
from blocktune.kernels.values.errors import StoreError


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_silent_server_is_not_waited_for_for_ever(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr(waiting, "CONNECT_SECONDS", 2)
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not work"):
        ResultStore.open(f"postgresql+psycopg://user@127.0.0.1:{silent_port}/name")
    assert time.monotonic() - began < 20


def options(url: str, *, patience_seconds: float = 30.0, read_only: bool = True) -> dict[str, int | str]:
    return server._options(make_url(url), patience_seconds, read_only=read_only)


def test_the_url_has_the_last_word() -> None:
    assert options("postgresql+psycopg://host/name")["connect_timeout"] == 10
    assert "connect_timeout" not in options("postgresql+psycopg://host/name?connect_timeout=99")
    assert options("mysql+pymysql://host/name") == {}


def test_who_waits_less_for_a_lock_waits_less_for_a_connection() -> None:
    seconds = [options("postgresql://host/name", patience_seconds=each)["connect_timeout"] for each in (1.0, 7.5, 99.0)]
    assert seconds == [5, 8, 10]


def test_whoever_writes_looks_for_a_server_that_takes_it() -> None:
    url, chosen = "postgresql+psycopg://a,b/name", "target_session_attrs"
    assert options(url, read_only=False)[chosen] == "read-write"
    assert chosen not in options(url)
    assert chosen not in options(f"{url}?{chosen}=any", read_only=False)


class Refused(Exception):
    pass


class Server:
    """A driver whose server refuses for a while."""

    driver = "psycopg2"
    loaded_dbapi = SimpleNamespace(OperationalError=Refused)

    def __init__(self, words: str = "connection refused") -> None:
        self.words = words
        self.refusals = 0

    def connect(self) -> str:
        if self.refusals:
            self.refusals -= 1
            raise Refused(self.words)
        return "connection"


def assert_up_to(pauses: list[float], longest: list[float]) -> None:
    """Each pause is drawn from the second half of its length, so that clients that came together part."""
    assert len(pauses) == len(longest)
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True)), pauses
    assert len({pause / most for pause, most in zip(pauses, longest, strict=True)}) > 1


def test_a_server_that_was_reached_is_waited_for_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    here = Server()
    connecting = server._Connecting(patience_seconds=30)
    here.refusals = 1
    with pytest.raises(Refused):
        connecting.connect(here, None, (), {})
    assert pauses == []
    assert connecting.connect(here, None, (), {}) == "connection"
    here.refusals = 4
    assert connecting.connect(here, None, (), {}) == "connection"
    assert_up_to(pauses, [0.1, 0.2, 0.4, 0.8])


@pytest.mark.parametrize(
    "words", ["FATAL:  sorry, too many clients already", "FATAL:  the database system is starting up"]
)
def test_a_busy_server_is_waited_for_at_the_first_time(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    here = Server(words)
    here.refusals = 5
    assert server._Connecting(patience_seconds=30).connect(here, None, (), {}) == "connection"
    assert_up_to(pauses, [0.1, 0.2, 0.25, 0.25, 0.25])


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Server()
    connecting = server._Connecting(patience_seconds=0.3)
    connecting.connect(here, None, (), {})
    here.refusals = 10**9
    began = time.monotonic()
    with pytest.raises(Refused):
        connecting.connect(here, None, (), {})
    assert time.monotonic() - began < 60


def dropping(place: str, store: ResultStore, times: int) -> None:
    """Makes the server end the store's connection at the first statements that follow."""
    import psycopg

    left = [times]
    address = place.replace("+psycopg", "")

    def drop(*_: Any) -> None:
        if left[0]:
            left[0] -= 1
            with closing(psycopg.connect(address, autocommit=True)) as other:
                others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                other.execute(f"SELECT pg_terminate_backend(pid, 5000) {others}")

    event.listen(store._engines.reader, "before_cursor_execute", drop)


def test_a_dropped_connection_costs_no_measurement(
    new_postgres_database: Callable[[], str], trial: Trial, best: Best
) -> None:
    place = new_postgres_database()
    with ResultStore.open(place) as store:
        dropping(place, store, 2)
        store.record(trial)
        assert store.set_best(best)
    with ResultStore.open(place) as store:
        dropping(place, store, 1)
        assert (store.trials(), store.bests()) == ([trial], [best])


def test_a_server_that_drops_every_connection_is_given_up(
    new_postgres_database: Callable[[], str], trial: Trial
) -> None:
    place = new_postgres_database()
    with ResultStore.open(place, lock_timeout_seconds=0.5) as store:
        dropping(place, store, 10**9)
        with pytest.raises(StoreError, match="does not work"):
            store.record(trial)
