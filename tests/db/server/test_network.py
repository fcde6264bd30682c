"""A network between a client and its server that cuts, resets and falls silent: work is done once, or refused."""

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables import waiting
from blocktune.db.tables.schema import CURRENT
from blocktune.kernels.values.errors import StoreError
from tests.db.server.test_versions import older_store
from tests.support.stores.postgres_server import ADMIN, PostgresServer
from tools.stores.server.proxy import WELL, Ending, Fault, Moment, Proxy, running_proxy

LATER = [moment for moment in Moment if moment is not Moment.START]
SILENT_STATEMENT = Fault(Ending.SILENCE, Moment.STATEMENT, pieces=3)


@pytest.fixture
def proxy(own_server: PostgresServer) -> Iterator[Proxy]:
    with running_proxy(own_server.folder) as proxy:
        yield proxy


@pytest.fixture
def place(own_server: PostgresServer, proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """The URL of a new store behind the proxy."""
    name = f"network_{abs(hash(request.node.name))}"
    ResultStore.open(own_server.create_database(name)).close()
    return proxy.url(name, ADMIN)


def meet(proxy: Proxy, *faults: Fault) -> None:
    """Have the next connections meet these faults, and no later one any."""
    left = list(faults)
    proxy.plan = lambda: left.pop(0) if left else WELL


@pytest.mark.few(3)
@pytest.mark.parametrize("moment", LATER)
@pytest.mark.parametrize("ending", [Ending.CLOSE, Ending.RESET])
def test_what_is_recorded_over_a_connection_that_ends_is_stored_once(
    proxy: Proxy, place: str, trial: Trial, ending: Ending, moment: Moment
) -> None:
    with ResultStore.open(place) as store:
        meet(proxy, *(Fault(ending, moment, pieces=number) for number in (3, 6)))
        store.record(trial)
        assert proxy.endings == 2
        assert store.trials() == [trial]


def test_a_lost_answer_to_a_commit_does_not_make_it_old_news(
    proxy: Proxy, place: str, trial: Trial, best: Best
) -> None:
    lost_answer = Fault(Ending.CLOSE, Moment.COMMITTED)
    with ResultStore.open(place) as store:
        meet(proxy, lost_answer)
        assert store.set_best(best)
        meet(proxy, lost_answer)
        assert store.merge([Results(trials=(trial,))], trust=True).trials == 1
        assert proxy.endings == 2


@pytest.mark.parametrize("moment", LATER)
def test_an_upgrade_over_a_connection_that_ends_is_done_again(
    own_server: PostgresServer, proxy: Proxy, trial: Trial, moment: Moment
) -> None:
    older_store(own_server, f"upgraded_{moment}")
    meet(proxy, WELL, Fault(Ending.RESET, moment, pieces=12))
    with ResultStore.open(proxy.url(f"upgraded_{moment}", ADMIN)) as store:
        assert proxy.endings == 1
        store.record(trial)
        health = store.health()
    assert (health.schema_version, health.sound, health.rows["kernel"]) == (CURRENT, True, 2)


def test_a_silent_server_is_given_up_after_a_word(
    proxy: Proxy, place: str, trial: Trial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "WARNING_SECONDS", 0.2)
    with ResultStore.open(place, lock_timeout_seconds=0.3) as store:
        proxy.plan = lambda: SILENT_STATEMENT
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"the server has not answered for 1 s\.") as refused:
            store.record(trial)
        assert time.monotonic() - began < 20
        proxy.plan = lambda: WELL
        store.record(trial)
        assert store.trials() == [trial]
    assert "has not answered for 0 s" in caplog.text
    assert "is given up after 5 s" in caplog.text
    assert "secret" not in caplog.text + str(refused.value)


def test_one_silent_connection_is_left_for_another(proxy: Proxy, place: str, trial: Trial) -> None:
    with ResultStore.open(place, lock_timeout_seconds=0.5) as store:
        meet(proxy, SILENT_STATEMENT)
        store.record(trial)
        assert store.trials() == [trial]


def test_a_server_that_is_at_work_is_not_given_up(place: str) -> None:
    with ResultStore.open(place, lock_timeout_seconds=0.1) as store:
        assert store._reading(lambda session: session.execute(text("SELECT 1 FROM pg_sleep(2.5)")).scalar_one()) == 1


def test_who_gets_no_connection_is_told(
    proxy: Proxy, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "WARNING_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "LEAST_CONNECT_SECONDS", 2)
    proxy.plan = lambda: Fault(Ending.SILENCE)
    with pytest.raises(StoreError, match="does not work"):
        ResultStore.open(place, lock_timeout_seconds=0.1)
    assert "cannot be reached" in caplog.text


def test_a_slow_line_costs_time_alone(proxy: Proxy, place: str, trial: Trial) -> None:
    with ResultStore.open(place) as store:
        proxy.plan = lambda: Fault(delays_s=(0.0, 0.05), bytes_per_s=200_000.0)
        store.record(trial)
        assert store.trials() == [trial]
