"""Which rows are read from the pages of a file and of its log, whatever SQLite makes of them."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.records.records import Best, Trial
from blocktune.db.recovery.salvage import salvage_rows
from blocktune.db.store import ResultStore
from blocktune.db.tables.sqlite_file import connect_sqlite
from tests.support.stores.filled_stores import filled


@pytest.mark.parametrize("spoil", [False, True])
def test_commits_that_wait_in_the_log_are_saved(tmp_path: Path, best: Best, trial: Trial, *, spoil: bool) -> None:
    path, copy = tmp_path / "blocktune.db", tmp_path / "damaged" / "blocktune.db"
    copy.parent.mkdir()
    filled(path, best, trial, 20)
    with closing(connect_sqlite(f"{path.as_uri()}?mode=rw", 1)) as keeps_the_log:
        keeps_the_log.execute("SELECT count(*) FROM trial").fetchone()
        with ResultStore.open(path) as store:
            for n in range(20, 40):
                store.record(replace(trial, config=replace(trial.config, extra=(("n", n),))))
        log = bytearray(Path(f"{path}-wal").read_bytes())
        content = bytearray(path.read_bytes())
    content[content.find(b"CREATE TABLE trial") + 3] = 255
    first_page = log.find(b"CREATE TABLE trial")  # SQLite would take a page of the log for the one in the file
    assert first_page < 0
    if spoil:
        log[len(log) * 3 // 4] ^= 1
    copy.write_bytes(content)
    Path(f"{copy}-wal").write_bytes(log)
    found = salvage_rows(copy)
    if spoil:
        assert 20 <= len(found.trials) < 40
        assert found.lost_at_most is None
    else:
        assert (len(found.trials), found.lost_at_least, found.lost_at_most) == (40, 0, 0)


def test_deleted_rows_do_not_come_back(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 90)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM trial WHERE id > 10")
        assert connection.execute("PRAGMA freelist_count").fetchone()[0] > 0
    found = salvage_rows(path)
    assert len(found.trials) == 10
    assert found.lost_at_least == 0
    assert found.lost_at_most in range(81)  # their pages are there, some builds of SQLite empty them


@pytest.mark.parametrize("page_bytes", [512, 1024, 8192, 65536])
def test_pages_of_any_size_are_found(tmp_path: Path, best: Best, trial: Trial, page_bytes: int) -> None:
    path = tmp_path / "blocktune.db"
    filled(path, best, trial, 90)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("VACUUM")
    content = path.read_bytes()
    assert int.from_bytes(content[16:18], "big") == page_bytes % 65535
    path.write_bytes(b"\0" * 100 + content[100:])
    found = salvage_rows(path)
    assert (len(found.bests), len(found.trials), found.lost_at_least) == (1, 90, 0)


def test_a_store_of_the_first_schema_is_read(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 5)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE environment DROP COLUMN regime")
    found = salvage_rows(path)
    assert (found.bests, len(found.trials), found.lost_at_most) == ((best,), 5, 0)
