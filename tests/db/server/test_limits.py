"""A server's own limits and settings: connections, disks, locks, and what a role has set."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from blocktune.db.records.bulk_writer import BulkWriter
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables import engine as store_engines
from blocktune.db.tables import waiting
from blocktune.db.tables.models import ConfigRow, TrialRow
from blocktune.kernels.values.errors import StoreError, StoreLockedError
from tests.support.stores.postgres_server import ADMIN, PostgresServer

DATABASE = "limits"


@pytest.fixture
def place(own_server: PostgresServer) -> Iterator[str]:
    place = own_server.create_database(DATABASE)
    ResultStore.open(place).close()
    yield place
    own_server.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


@contextmanager
def transaction(server: PostgresServer, *statements: str) -> Iterator[None]:
    """Keep a transaction open until the block ends."""
    with psycopg.connect(f"host={server.folder} user={ADMIN} dbname={DATABASE}") as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield
        connection.rollback()


def numbered(trial: Trial, number: int) -> Trial:
    return replace(trial, config=replace(trial.config, extra=(("number", number),)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "setting",
    ["datestyle = 'SQL, DMY'", "timezone = 'Asia/Kathmandu'", "default_transaction_isolation = 'serializable'",
     "client_encoding = 'LATIN1'", "extra_float_digits = -10", "lock_timeout = '1ms'"],
)  # fmt: skip
def test_settings_of_a_role_change_nothing(
    own_server: PostgresServer, place: str, trial: Trial, best: Best, setting: str
) -> None:
    own_server.execute(f"ALTER DATABASE {DATABASE} SET {setting}")
    with ResultStore.open(place) as store:
        store.record(trial)
        store.set_best(best)
        assert store.trials() == [trial]
        assert store.bests() == [best]


def test_a_writer_sees_what_was_stored_while_it_waited(own_server: PostgresServer, place: str, trial: Trial) -> None:
    own_server.execute(f"ALTER DATABASE {DATABASE} SET default_transaction_isolation = 'repeatable read'")
    with ResultStore.open(place) as store:
        waiting = threading.Thread(target=store.record, args=(numbered(trial, 1),))

        def record(writer: BulkWriter) -> None:
            waiting.start()
            time.sleep(0.3)
            writer.put_trial(numbered(trial, 2))  # adds the rows that both refer to

        store._write(record)
        waiting.join()
        assert {each.config.parameters["number"] for each in store.trials()} == {1, 2}


def test_a_full_disk_of_the_server_is_called_so(own_server: PostgresServer, place: str, trial: Trial) -> None:
    own_server.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'could not extend file' USING ERRCODE = '53100'; END $$",
        "CREATE TRIGGER full_disk BEFORE INSERT ON trial EXECUTE FUNCTION refuse()",
        database=DATABASE,
    )
    with ResultStore.open(place) as store, pytest.raises(StoreError, match=r"is full\. Make room and try again"):
        store.record(trial)


def test_a_server_without_a_free_connection_is_waited_for_and_given_up(
    own_server: PostgresServer, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "WARNING_SECONDS", 0.2)
    own_server.execute("CREATE ROLE guest LOGIN CONNECTION LIMIT 0")
    own_server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest", database=DATABASE)
    guest = own_server.url(DATABASE, "guest")
    with pytest.raises(StoreError, match='too many connections for role "guest"') as refused:
        ResultStore.open(guest, read_only=True, lock_timeout_seconds=0.5)
    assert "secret" not in str(refused.value) + caplog.text
    assert "has not answered" in caplog.text
    raising = threading.Timer(0.5, own_server.execute, ("ALTER ROLE guest CONNECTION LIMIT 5",))
    raising.start()
    with ResultStore.open(guest, read_only=True) as store:
        assert store.trials() == []
    raising.join()


def test_a_reader_behind_a_locked_table_is_refused_in_time(own_server: PostgresServer, place: str) -> None:
    with ResultStore.open(place, lock_timeout_seconds=0.3) as store:
        with transaction(own_server, "LOCK TABLE trial"), pytest.raises(StoreLockedError):
            store.trials()
        assert store.trials() == []


def test_a_reader_that_meets_an_upgrade_in_a_deadlock_reads_again(
    own_server: PostgresServer, place: str, trial: Trial
) -> None:
    own_server.execute(f"ALTER DATABASE {DATABASE} SET deadlock_timeout = '10ms'")
    locks = ("LOCK TABLE config", "SET LOCAL deadlock_timeout = '60s'", "LOCK TABLE trial")

    def upgrade() -> None:
        with transaction(own_server, *locks):
            pass

    upgrading = threading.Thread(target=upgrade)

    def read(session: Session) -> int:
        session.execute(select(TrialRow.id))
        if not upgrading.ident:
            upgrading.start()
            time.sleep(0.5)
        return len(session.execute(select(ConfigRow.id)).all())

    with ResultStore.open(place) as store:
        store.record(trial)
        assert store._reading(read) == 1
    upgrading.join()


def test_a_client_that_stops_within_its_transaction_holds_no_other_up(
    place: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_engines, "PAUSE_SECONDS", 1)
    with ResultStore.open(place) as stopped, ResultStore.open(place) as other:
        times = iter((2.5, 0.0))

        def record(writer: BulkWriter) -> None:
            time.sleep(next(times))
            writer.put_trial(numbered(trial, 1))

        stopping = threading.Thread(target=stopped._write, args=(record,))
        stopping.start()
        time.sleep(0.3)
        began = time.monotonic()
        other.record(numbered(trial, 2))
        assert time.monotonic() - began < 2
        stopping.join()
        assert {each.config.parameters["number"] for each in other.trials()} == {1, 2}
