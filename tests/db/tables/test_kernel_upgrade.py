"""Rows of autotuned kernels move into the tables of all kernels, once, whole, and no sounder than they were."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.recovery.rebuild import recover
from blocktune.db.recovery.salvage import salvage_rows
from blocktune.db.store import ResultStore
from blocktune.db.tables.backups import backups_of
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.store_reader.store_file import SqliteRows
from blocktune.runtime.store_reader.store_views import DISPATCH, USER_DISPATCH
from tests.db.conftest import CONFIG, PROBLEM, SOURCE
from tests.support.stores.older_stores import make_schema_7

H200 = device_named("h200")
RENEWED = {"id", "checksum"}
"""The columns that differ afterwards."""


@pytest.fixture
def older(path: Path) -> Path:
    make_schema_7(path)
    return path


def rows(path: Path, table: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [
            {name: row[name] for name in row.keys() if name not in RENEWED}  # noqa: SIM118 - a row's names
            for row in connection.execute(f"SELECT * FROM {table} ORDER BY problem, config, source_hash")
        ]


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def test_all_rows_are_there_under_their_new_checksums(older: Path) -> None:
    with ResultStore.open(older) as store:
        assert store.health().integrity == "ok"
        assert (len(store.trials()), len(store.bests())) == (1, 1)
        assert len(store.kernel_bests()) == 4
        trials = store.trials(H200, PROBLEM, kernel_hash=SOURCE)
        best = store.best(H200, PROBLEM, kernel_hash=SOURCE)
        other = store.best(H200, PROBLEM, kernel_hash="f" * 16)
    assert best is not None
    assert other is not None
    assert (best.config, best.time_us, best.speedup_low) == (CONFIG, 12.5, 1.1)
    assert (other.default, other.trials) == (CONFIG, 0)
    assert sorted(trial.error for trial in trials) == ["", "out of shared memory"]
    assert max(trial.compile_seconds for trial in trials) == 0.5
    assert trials[0].telemetry.throttle_reasons == 0


def test_the_old_tables_are_views_and_production_reads_the_same(older: Path) -> None:
    before = rows(older, "user_trial"), rows(older, "user_best")
    served = [SqliteRows(older, view).read(H200) for view in (DISPATCH, USER_DISPATCH)]
    assert [len(each) for each in served] == [1, 4]
    ResultStore.open(older).close()
    assert (rows(older, "user_trial"), rows(older, "user_best")) == before
    assert [SqliteRows(older, view).read(H200) for view in (DISPATCH, USER_DISPATCH)] == served


@pytest.mark.parametrize(
    ("table", "name"), [("user_trial", "samples_us"), ("user_best", "config"), ("user_best", "trials")]
)
def test_a_row_that_was_changed_before_is_named_afterwards(
    older: Path, caplog: pytest.LogCaptureFixture, table: str, name: str
) -> None:
    value = {"samples_us": "'[12.0, 12.5, 13.5]'", "config": """'{"BLOCK":129,"num_warps":4}'""", "trials": "9"}[name]
    change(older, f"UPDATE {table} SET {name} = {value} WHERE id = 1")
    with ResultStore.open(older) as store:
        kept = len(store.kernel_bests()) + len(store.trials(H200, PROBLEM))
        assert not store.health().sound
    assert kept == 5
    assert "not as they were written" in caplog.text


def test_rows_without_a_checksum_get_theirs(older: Path) -> None:
    change(older, "UPDATE user_best SET checksum = NULL, served_checksum = NULL")
    with ResultStore.open(older) as store:
        assert len(store.kernel_bests()) == 4
    with closing(sqlite3.connect(older)) as connection:
        query = "SELECT count(*) FROM best WHERE checksum IS NULL OR served_checksum IS NULL"
        assert connection.execute(query).fetchone() == (0,)


def test_a_backup_has_the_rows_as_they_were(older: Path) -> None:
    before = rows(older, "user_best")
    ResultStore.open(older).close()
    (backup,) = backups_of(older)
    assert rows(backup, "user_best") == before


def test_a_damaged_older_file_gives_them_up_too(older: Path) -> None:
    content = bytearray(older.read_bytes())
    content[content.find(b"CREATE TABLE user_trial") + 3] = 255
    older.write_bytes(content)
    found = salvage_rows(older)
    assert (len(found.trials), len(found.bests), found.lost_at_least, found.lost_at_most) == (3, 5, 0, 0)
    assert recover(older) is not None
    with ResultStore.open(older) as store:
        assert len(store.kernel_bests()) == 4
