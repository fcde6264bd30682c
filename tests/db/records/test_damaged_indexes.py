"""A damaged index hides rows that are still there: no reader passes over them without a word."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from blocktune.cli.shared.stores import existing_store
from blocktune.db.records import health
from blocktune.db.records.records import Best
from blocktune.db.recovery.rebuild import recover
from blocktune.db.sources import read_results
from blocktune.db.store import ResultStore


@pytest.fixture
def damaged(path: Path, bests: list[Best]) -> Path:
    """A store whose index of devices has another name for the only one, which a check of the pages cannot see."""
    with ResultStore.open(path) as store:
        for best in bests:
            store.set_best(best)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE type = 'index' AND tbl_name = 'device' AND sql IS NULL"
        ).fetchone()
    content, key = bytearray(path.read_bytes()), bests[0].device.key.encode()
    at = content.index(key, (page - 1) * 4096)
    assert at < page * 4096
    content[at] ^= 1
    path.write_bytes(content)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    return path


def test_a_command_says_that_rows_may_be_missing(
    damaged: Path, bests: list[Best], caplog: pytest.LogCaptureFixture
) -> None:
    with existing_store(str(damaged)) as store:
        assert store is not None
        assert "is damaged (" in caplog.text
        assert store.bests(bests[0].device) == []
        assert len(store.bests()) == len(bests)


def test_so_does_what_reads_another_store(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_results(str(damaged), trials=False).bests == ()
    assert "rows may be missing" in caplog.text


def test_doctor_names_it_and_a_recovery_loses_nothing(damaged: Path, bests: list[Best]) -> None:
    with ResultStore.open(damaged, read_only=True) as store:
        assert "missing from index" in store.health().integrity
    found = recover(damaged)
    assert found is not None
    assert found.bests == len(bests)
    with ResultStore.open(damaged, read_only=True) as store:
        assert len(store.bests(bests[0].device)) == len(bests)


def test_a_sound_or_large_file_costs_no_word(
    path: Path, damaged: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "MOST_CHECKED_BYTES", 0)
    with ResultStore.open(damaged, read_only=True) as store:
        store.warn_of_damage()
    monkeypatch.undo()
    sound = path.with_name("sound.db")
    with ResultStore.open(sound) as store:
        store.warn_of_damage()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
