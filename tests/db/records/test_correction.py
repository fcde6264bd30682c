"""One bit that has flipped in any column of a store is corrected: nothing is lost, and nothing is made up."""

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.explain.store_checks import store_findings
from blocktune.db.records.correction import BitCorrection
from blocktune.db.records.records import Best, KernelBest, KernelTrial, Trial
from blocktune.db.recovery.rebuild import recover
from blocktune.db.store import ResultStore
from blocktune.db.tables.models import Base
from tests.support.stores.new_stores import new_store

LINKED = ("device", "environment", "kernel", "shape", "config")
FLIPS_A_COLUMN = 3


@pytest.fixture
def stored(path: Path, best: Best, trial: Trial, kernel_best: KernelBest, kernel_trial: KernelTrial) -> Path:
    with ResultStore.open(new_store(path)) as store:
        store.put_all([trial, kernel_trial], [best, kernel_best])
    return path


def content(path: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in Base.metadata.tables}


def texts(path: Path, tables: tuple[str, ...]) -> Iterator[tuple[str, str, int, bytes]]:
    """The texts of some tables: table, column, id and bytes."""
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        for table in tables:
            for column in map(str, Base.metadata.tables[table].columns.keys()):
                query = f"SELECT id, {column} FROM {table} WHERE typeof({column}) = 'text' AND {column} <> ''"
                yield from ((table, column, row_id, value) for row_id, value in connection.execute(query))


def flip(path: Path, table: str, column: str, row_id: int, value: bytes, bit: int) -> None:
    changed = bytearray(value)
    changed[bit // 8] ^= 1 << bit % 8
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(f"UPDATE {table} SET {column} = CAST(? AS TEXT) WHERE id = ?", (bytes(changed), row_id))


def corrected(path: Path) -> list[BitCorrection]:
    with ResultStore.open(path) as store:
        return store.correct()


def test_a_sound_store_has_nothing_to_correct(stored: Path) -> None:
    before = content(stored)
    assert corrected(stored) == []
    assert content(stored) == before


def test_every_bit_of_an_environment_is_corrected(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.db.store.back_up", lambda path: None)
    before = content(stored)
    for table, column, row_id, value in texts(stored, ("environment",)):
        for bit in range(8 * len(value)):
            flip(stored, table, column, row_id, value, bit)
            assert corrected(stored) == [BitCorrection(table, row_id, column)], (column, bit)
            assert content(stored) == before


def test_a_sample_of_the_bits_of_every_text_is_corrected(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.db.store.back_up", lambda path: None)
    before, dice = content(stored), random.Random(4)
    for table, column, row_id, value in texts(stored, (*LINKED[:1], *LINKED[2:], "trial", "best")):
        # any sign between a date and a time means the same
        bits = [bit for bit in range(8 * len(value)) if column != "created_at" or bit // 8 != 10]
        for bit in dice.sample(bits, min(FLIPS_A_COLUMN, len(bits))):
            flip(stored, table, column, row_id, value, bit)
            corrected(stored)
            assert content(stored) == before, (table, column, bit)


@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ("UPDATE trial SET time_us = 99.50000000000001 WHERE id = 1", BitCorrection("trial", 1, "time_us")),
        ("UPDATE trial SET registers = registers + 1 WHERE id = 1", BitCorrection("trial", 1, "registers")),
        ("UPDATE shape SET seqlen_q = seqlen_q + 1 WHERE id = 1", BitCorrection("shape", 1, "seqlen_q")),
        ("UPDATE environment SET protocol = 3", BitCorrection("environment", 1, "protocol")),
        ("UPDATE device SET num_sms = num_sms + 1", BitCorrection("device", 1, "num_sms")),
    ],
)
def test_numbers_are_corrected_and_the_doctor_names_them(stored: Path, statement: str, place: BitCorrection) -> None:
    before = content(stored)
    with closing(sqlite3.connect(stored)) as connection, connection:
        connection.execute(statement)
    with ResultStore.open(stored) as store:
        assert not store.health().sound
        assert store.correct() == [place]
        assert store.health().sound
    assert content(stored) == before


def test_two_flipped_bits_are_left_alone(stored: Path) -> None:
    with closing(sqlite3.connect(stored)) as connection, connection:
        connection.execute("UPDATE environment SET torch = 'zz.11.0'")
    before = content(stored)
    assert corrected(stored) == []
    assert content(stored) == before


def test_a_recovery_saves_what_one_bit_had_cost(stored: Path, best: Best, trial: Trial) -> None:
    with closing(sqlite3.connect(stored)) as connection, connection:
        connection.execute("UPDATE environment SET torch = CAST(x'322e31b12e30' AS TEXT)")  # 2.11.0 with one bit more
    with ResultStore.open(stored) as store:
        assert store.bests() == []
    found = recover(stored)
    assert found is not None
    assert (found.bests, found.trials, found.lost_at_most) == (2, 2, 0)
    with ResultStore.open(stored) as store:
        assert (store.bests(), store.trials()) == ([best], [trial])


def test_the_doctor_corrects_a_bit_and_says_so_once(stored: Path, best: Best, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(stored))
    with closing(sqlite3.connect(stored)) as connection, connection:
        connection.execute("UPDATE config SET document = replace(document, '\"block_m\":128', '\"block_m\":129')")
    found = {finding.name: finding for finding in store_findings(None)}
    assert "config.document of row 1" in found["database corrected"].value
    assert "database integrity" not in found
    assert [finding.name for finding in store_findings(None) if "corrected" in finding.name] == []
    with ResultStore.open(stored) as store:
        assert store.bests() == [best]
