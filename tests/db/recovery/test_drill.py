"""A drill damages copies, never the store, and counts what is lost of them."""

import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Trial
from blocktune.db.recovery import drill as drill_module
from blocktune.db.recovery.drill import DAMAGES, drill
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import StoreError, UsageError
from tests.support.stores.odd_values import odd_file


@pytest.fixture
def filled(path: Path, bests: list[Best], trial: Trial) -> Path:
    trials = tuple(replace(trial, config=replace(trial.config, extra=(("n", n),))) for n in range(60))
    with ResultStore.open(path) as store:
        store.merge([Results(bests=tuple(bests), trials=trials)], trust=True)
    return path


def content_of(path: Path) -> bytes:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


def test_every_copy_is_counted_and_the_store_is_left_alone(filled: Path) -> None:
    before = content_of(filled)
    done: list[int] = []
    counts = drill(filled, ways=2 * len(DAMAGES), seed=3, on_progress=done.append)
    assert filled.read_bytes() == before
    assert done[-1] == counts.copies == 2 * len(DAMAGES)
    assert counts.rows == 65
    assert counts.wrong == counts.understated == 0
    assert counts.lost > 0  # a copy that was cut short cannot be whole
    assert counts.worst <= counts.rows
    assert counts.untouched + counts.whole + counts.refused <= counts.copies


@pytest.mark.few(5)
@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damage_damages(filled: Path, number: int) -> None:
    content = content_of(filled)
    assert any(DAMAGES[number](content, random.Random(seed)) != content for seed in range(5))


def test_a_recovery_that_understates_or_invents_is_noticed(
    filled: Path, monkeypatch: pytest.MonkeyPatch, bests: list[Best]
) -> None:
    def forgetful(copy: Path) -> None:
        with closing(sqlite3.connect(copy)) as connection, connection:
            connection.execute("DELETE FROM trial WHERE id = 1")
            connection.execute("UPDATE best SET checksum = 'invented' WHERE id = 1")

    monkeypatch.setattr(drill_module, "recover", forgetful)
    monkeypatch.setattr(drill_module, "DAMAGES", (lambda content, dice: content,))
    counts = drill(filled, ways=1)
    assert (counts.understated, counts.wrong, counts.lost) == (1, 1, 2)


def test_it_needs_a_sound_file(filled: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such store"):
        drill(tmp_path / "absent.db")
    with pytest.raises(UsageError, match="server"):
        drill("postgresql+psycopg://nowhere/results")
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute("UPDATE trial SET time_us = 1.5 WHERE id = 1")
    with pytest.raises(StoreError, match="damaged"):
        drill(filled)


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "endless"])
def test_what_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is (not a file|a directory)"):
        drill(odd_file(tmp_path, kind))
