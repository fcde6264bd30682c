"""Store files that someone wrote to do harm: nothing that their schema says is run, and Ctrl-C ends every reading."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from blocktune.db.records.records import Best, Trial
from blocktune.db.sources import read_results
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.db.tables.sqlite_file import connect_sqlite
from blocktune.db.tables.store_errors import translate_errors
from blocktune.kernels.values.errors import StoreCorruptError, StoreError, StoreLockedError

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def stored(path: Path, best: Best, trial: Trial) -> Path:
    with ResultStore.open(path) as store:
        store.record(trial)
        store.set_best(best)
    return path


def changed(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in ("PRAGMA legacy_alter_table = ON", *statements):
            connection.execute(statement)


def endless_view(table: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        listed = ", ".join(f"i AS {column}" for column in columns)
        view = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {listed} FROM n WHERE i < 0"
        views = ("dispatch", "user_dispatch", "user_trial", "user_best")
        changed(path, *(f"DROP VIEW {view}" for view in views), f"DROP TABLE {table}")
        changed(path, f"CREATE VIEW {table} AS {view}")

    return make


def trigger(path: Path) -> None:
    changed(path, f"CREATE TRIGGER t AFTER INSERT ON trial BEGIN SELECT count(*) FROM ({ENDLESS}); END")


def virtual_table(path: Path) -> None:
    changed(path, "DROP TABLE trial", "CREATE VIRTUAL TABLE trial USING fts5(id)")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make", [endless_view("best"), endless_view("device"), endless_view("shape"), trigger, virtual_table]
)
def test_a_schema_that_would_run_code_is_refused_by_every_way_in(stored: Path, make: Callable[[Path], None]) -> None:
    make(stored)
    for enter in (
        ResultStore.open,
        ResultStore.open_to_read,
        lambda place: ResultStore.open(place, read_only=True),
        lambda place: read_results(place, trials=True),
    ):
        with pytest.raises(StoreCorruptError, match="plain tables"):
            enter(stored)


@pytest.mark.parametrize(
    "sql", ["SELECT hex(zeroblob(40000000))", "SELECT replace(hex(zeroblob(4000000)), '0', 'aaaa')"]
)
def test_no_value_takes_the_memory(stored: Path, sql: str) -> None:
    with (
        pytest.raises(StoreCorruptError, match="too big"),
        translate_errors(StoreTarget(path=stored)),
        closing(connect_sqlite(stored.as_uri(), 1)) as connection,
    ):
        connection.execute(sql).fetchone()


@contextmanager
def pressed_after(seconds: float) -> Iterator[None]:
    """Press Ctrl-C while the block runs."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    yield


def test_ctrl_c_ends_a_statement_that_never_ends(stored: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        translate_errors(StoreTarget(path=stored)),
        closing(connect_sqlite(stored.as_uri(), 1)) as connection,
        pressed_after(0.3),
    ):
        connection.execute(ENDLESS).fetchone()


def test_ctrl_c_ends_the_wait_for_another_writer(stored: Path, trial: Trial) -> None:
    with closing(sqlite3.connect(stored, isolation_level=None)) as other, ResultStore.open(stored) as store:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt), pressed_after(0.3):
            store.record(trial)
        assert time.monotonic() - began < 20  # without the interrupt it waits 30 s
        other.execute("ROLLBACK")
        store.record(trial)


def test_a_writer_waits_as_long_as_it_was_told(stored: Path, trial: Trial) -> None:
    with (
        closing(sqlite3.connect(stored, isolation_level=None)) as other,
        ResultStore.open(stored, lock_timeout_seconds=1) as store,
    ):
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StoreLockedError):
            store.record(trial)
        assert 0.8 < time.monotonic() - began < 20  # 30 s where nothing is said


@pytest.mark.timeout(30)
def test_a_pipe_is_no_store(path: Path) -> None:
    os.mkfifo(path)
    for enter in (ResultStore.open, ResultStore.open_to_read):
        with pytest.raises(StoreError, match="is not a file"):
            enter(path)


@pytest.mark.parametrize("version", ["0000", "\u00b2", "1" * 5000])
def test_a_version_that_is_none_of_ours(stored: Path, version: str) -> None:
    changed(stored, f"UPDATE blocktune_schema SET version_num = '{version}'")
    with pytest.raises(StoreCorruptError, match="one revision number") as caught:
        ResultStore.open(stored)
    assert len(str(caught.value)) < 1000


@pytest.mark.few(2)
@pytest.mark.parametrize("parent", ["shape", "config", "kernel", "environment", "device"])
def test_a_link_that_leads_nowhere_is_said_by_every_reader(stored: Path, best: Best, parent: str) -> None:
    changed(stored, f"DELETE FROM {parent}")
    for table in ("best", "trial"):
        changed(stored, f"UPDATE {table} SET checksum = NULL")
    with ResultStore.open_to_read(stored) as store:
        for read in (store.bests, store.trials):
            with pytest.raises(StoreCorruptError, match=r"refers to a .*that does not exist"):
                read()
        assert "links between rows lead nowhere" in store.health().integrity
