"""What becomes of a damaged store: its sound rows in a new one, the old file kept, and an honest count of losses."""

import os
import random
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.records.records import Best, KernelBest, KernelTrial, Trial
from blocktune.db.recovery.drill import drill
from blocktune.db.recovery.rebuild import recover
from blocktune.db.recovery.restoring import restore
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import (
    ForeignStoreError,
    SchemaTooNewError,
    StoreError,
    StoreLockedError,
    UsageError,
)
from tests.support.stores.filled_stores import files_in, filled


def test_a_sound_store_is_left_alone(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 3)
    before = path.read_bytes()
    assert recover(path) is None
    assert path.read_bytes() == before
    assert files_in(path.parent) == [path.name]


def test_holes_are_passed_over(path: Path, best: Best, trial: Trial) -> None:
    """A file may have any length: reading 20 GB of zeros took minutes."""
    filled(path, best, trial, 12)
    with path.open("r+b") as file:
        file.write(b"\xff" * 100)
    os.truncate(path, 20 << 30)
    began = time.process_time()
    found = recover(path)
    assert time.process_time() - began < 10
    assert found is not None
    assert (found.bests, found.trials) == (1, 12)


def test_rows_that_break_a_rule_are_left_behind(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 12)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE trial SET time_us = -1 WHERE id = 2")
        connection.execute("UPDATE trial SET samples_us = 'no json' WHERE id = 3")
        connection.execute("UPDATE trial SET created_at = 'yesterday' WHERE id = 5")
        connection.execute("UPDATE trial SET config_id = 999 WHERE id = 6")
    found = recover(path)
    assert found is not None
    assert (found.bests, found.trials, found.lost_at_least, found.lost_at_most) == (1, 8, 4, 4)
    assert found.losses == "4 are lost"
    assert recover(path) is None


def test_rows_of_autotuned_kernels_are_saved_by_their_rules(
    path: Path, trial: Trial, best: Best, kernel_trial: KernelTrial, kernel_best: KernelBest
) -> None:
    filled(path, best, trial, 3)
    hostile = replace(kernel_best, kernel_hash="f" * 16)
    with ResultStore.open(path) as store:
        store.put_all([kernel_trial], [kernel_best, hostile])
    with closing(sqlite3.connect(path)) as connection, connection:
        text = "x\n    0: __import__('os').system('id'),#"
        connection.execute("UPDATE kernel SET source_hash = ? WHERE source_hash = ?", (text, hostile.kernel_hash))
    found = recover(path)
    assert found is not None
    assert (found.bests, found.trials, found.lost_at_most) == (2, 4, 1)
    with ResultStore.open(path) as store:
        assert store.kernel_bests(kernel_best.device) == [kernel_best]
        assert store.trials(kernel_trial.device, kernel_trial.shape) == [kernel_trial]


def test_a_file_of_noise_becomes_a_fresh_store_and_is_kept(path: Path) -> None:
    noise = random.Random(1).randbytes(20_000)
    path.write_bytes(noise)
    found = recover(path)
    assert found is not None
    assert (found.bests, found.trials) == (0, 0)
    assert found.lost_at_most is None  # 20,000 bytes are no whole number of pages
    assert "unknown" in found.losses
    assert Path(found.kept).read_bytes() == noise
    with ResultStore.open(path, read_only=True) as store:
        assert store.bests() == []


def test_a_newer_store_is_not_recovered_by_an_older_blocktune(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 5)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE blocktune_schema SET version_num = '9999'")
    content = bytearray(path.read_bytes())
    content[content.find(b"CREATE TABLE trial") + 3] = 255
    path.write_bytes(content)
    with pytest.raises(SchemaTooNewError, match="9999"):
        recover(path)
    assert path.read_bytes() == content


def test_a_pipe_is_no_store(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(StoreError, match="is not a file"):
        recover(path)


def test_a_lock_is_no_damage(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 3)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreLockedError):
            recover(path, lock_timeout_seconds=0.1)
    assert files_in(path.parent) == [path.name]


def test_what_cannot_be_recovered_is_refused(tmp_path: Path) -> None:
    export = tmp_path / "h200.txt"
    export.write_text('{"format": "blocktune-results"}\n')
    with pytest.raises(ForeignStoreError, match="is a text file"):
        recover(export)
    assert files_in(tmp_path) == ["h200.txt"]
    with pytest.raises(UsageError, match="results file by its name"):
        recover(tmp_path / "h200.json")
    with pytest.raises(UsageError, match="only a SQLite file"):
        recover("postgresql+psycopg://user:secret@host/name")
    with pytest.raises(StoreError, match="No such store"):
        recover(tmp_path / "missing.db")


def test_a_name_that_no_file_can_have_is_refused_in_words() -> None:
    for act in (recover, restore, drill):
        with pytest.raises(StoreError, match="File name too long"):
            act("x" * 5000)
