"""Every row has a checksum of what it says: a row that changed is named and left out, by every reader."""

import json
import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.exchange.importing import records_from
from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, KernelBest, KernelTrial, Trial
from blocktune.db.records.row_checksums import record_checksum, served_checksum
from blocktune.db.store import ResultStore
from blocktune.db.tables.schema import CURRENT
from blocktune.kernels.values.errors import BlocktuneError, ImportRejectedError
from blocktune.runtime.store_reader.export_file import rows_in_file
from blocktune.runtime.store_reader.store_file import SqliteRows
from blocktune.runtime.store_reader.store_views import USER_DISPATCH
from tests.support.stores.older_stores import make_older

SERVED = {
    "shape": "document",
    "config": "document",
    "kernel": "source_hash",
    "environment": "triton",
    "best": "time_us",
}
WHOLE = SERVED | {"best": "speedup_low", "trial": "samples_us"}
LEFT_OUT = "left out"


@pytest.fixture
def filled(path: Path, bests: list[Best], trial: Trial, kernel_trial: KernelTrial, kernel_best: KernelBest) -> Path:
    """Five winners and trials, and one of each of an autotuned kernel."""
    trials = [replace(trial, shape=best.shape) for best in bests]
    with ResultStore.open(path) as store:
        store.merge([Results(bests=tuple(bests), trials=tuple(trials))], trust=True)
        store.put_all([kernel_trial], [kernel_best])
    return path


def sql(path: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        return connection.execute(statement, values).fetchall()


def one_bit_off(value: Any) -> Any:
    """The same value with one bit changed, as long as it was."""
    if isinstance(value, float):
        return value * 1.0000000000000002
    digit = next(index for index in range(len(value) - 1, -1, -1) if value[index].isalnum())
    return value[:digit] + chr(ord(value[digit]) ^ 1) + value[digit + 1 :]


def change_one(path: Path, table: str, column: str, row_id: int = 1) -> None:
    """Flips a bit of a row: of the first one, to which the first winner refers."""
    ((value,),) = sql(path, f"SELECT {column} FROM {table} WHERE id = ?", row_id)
    sql(path, f"UPDATE {table} SET {column} = ? WHERE id = ?", one_bit_off(value), row_id)


@pytest.mark.few(3)
@pytest.mark.parametrize(("table", "column"), sorted(WHOLE.items()))
def test_a_flipped_bit_costs_its_rows_and_is_named(
    filled: Path, bests: list[Best], caplog: pytest.LogCaptureFixture, table: str, column: str
) -> None:
    change_one(filled, table, column)
    with ResultStore.open(filled) as store:
        kept = store.trials() if table == "trial" else store.bests()
        assert not store.health().sound
    assert len(kept) == (4 if table in ("best", "trial", "shape") else 0)  # all five share the others
    assert LEFT_OUT in caplog.text
    assert "`trial`" in caplog.text or "`best`" in caplog.text
    if table != "trial":
        assert all(best in bests for best in kept)


@pytest.mark.parametrize(("table", "column"), sorted(SERVED.items()))
def test_production_serves_no_changed_row(
    filled: Path, best: Best, caplog: pytest.LogCaptureFixture, table: str, column: str
) -> None:
    sound = SqliteRows(filled).read(best.device)
    change_one(filled, table, column)
    rows = SqliteRows(filled).read(best.device)
    assert len(sound) == 5
    assert len(rows) == (4 if table in ("best", "shape") else 0)
    assert all(row in sound for row in rows)
    assert f"{5 - len(rows)} row(s)" in caplog.text
    assert best.device.key in caplog.text


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("table", "column"),
    [("kernel", "name"), ("kernel", "source_hash"), ("config", "document"), ("shape", "document"), ("best", "time_us")],
)
def test_so_does_an_autotuned_kernel(
    filled: Path, kernel_best: KernelBest, caplog: pytest.LogCaptureFixture, table: str, column: str
) -> None:
    assert len(SqliteRows(filled, USER_DISPATCH).read(kernel_best.device)) == 1
    link = "b.id" if table == "best" else f"b.{table}_id"
    query = "FROM best b JOIN shape s ON s.id = b.shape_id WHERE s.direction IS NULL"
    ((row_id,),) = sql(filled, f"SELECT {link} {query}")
    change_one(filled, table, column, row_id)
    assert SqliteRows(filled, USER_DISPATCH).read(kernel_best.device) == []
    with ResultStore.open(filled) as store:
        assert store.kernel_bests(kernel_best.device) == []
        assert not store.health().sound
    assert LEFT_OUT in caplog.text
    assert "row(s)" in caplog.text


def test_rows_that_an_older_version_adds_after_the_upgrade_get_their_checksum(filled: Path, bests: list[Best]) -> None:
    """A process that opened the store before the upgrade goes on writing, and knows no checksums."""
    before = (
        sql(filled, "SELECT id, checksum, served_checksum FROM best"),
        sql(filled, "SELECT id, checksum FROM trial"),
    )
    sql(filled, "UPDATE best SET checksum = NULL, served_checksum = NULL WHERE id = 1")
    sql(filled, "UPDATE trial SET checksum = NULL WHERE id > 2")
    with ResultStore.open(filled) as store:
        assert len(store.bests()) == len(bests)
    assert (
        sql(filled, "SELECT id, checksum, served_checksum FROM best"),
        sql(filled, "SELECT id, checksum FROM trial"),
    ) == before


@pytest.mark.parametrize("table", ["trial", "best"])
def test_an_opening_reads_no_table_to_find_rows_without_a_checksum(filled: Path, table: str) -> None:
    ((*_, plan),) = sql(filled, f"EXPLAIN QUERY PLAN SELECT 1 FROM {table} WHERE checksum IS NULL LIMIT 1")
    assert f"ix_{table}_unchecked" in plan


def test_no_random_byte_of_a_row_serves_another_config(filled: Path, best: Best, tmp_path: Path) -> None:
    dice = random.Random(5)
    sound = {json.dumps(row, sort_keys=True) for row in SqliteRows(filled).read(best.device)}
    content = sqlite_bytes(filled)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[dice.randrange(4096, len(damaged))] ^= 1 << dice.randrange(8)
        copy = tmp_path / "copy.db"
        copy.write_bytes(damaged)
        try:
            rows = SqliteRows(copy).read(best.device)
        except BlocktuneError:  # a page that SQLite refuses
            continue
        assert {json.dumps(row, sort_keys=True) for row in rows} <= sound


def sqlite_bytes(path: Path) -> bytes:
    sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


def test_a_changed_winner_is_replaced_by_a_slower_older_one(filled: Path, bests: list[Best]) -> None:
    change_one(filled, "best", "speedup_low")
    with ResultStore.open(filled) as store:
        left = store.bests()
        lost = next(best for best in bests if best not in left)
        older = replace(lost, time_us=200.0, created_at=lost.created_at.replace(year=2025))
        assert store.set_best(older)
        assert older in store.bests()


def test_what_is_a_whole_number_may_come_back_as_one(path: Path, trial: Trial, best: Best) -> None:
    whole = replace(trial, time_us=5, samples_us=(5, 6.0), occupancy=1)
    with ResultStore.open(path) as store:
        store.record(whole)
        store.set_best(replace(best, time_us=7))
        assert len(store.trials()) == len(store.bests()) == 1
    assert len(SqliteRows(path).read(best.device)) == 1


def test_documents_that_say_the_same_in_other_words_are_as_they_were_written(
    filled: Path, bests: list[Best], caplog: pytest.LogCaptureFixture
) -> None:
    sql(filled, "UPDATE shape SET document = replace(document, ',', ', ')")
    sql(filled, "UPDATE config SET document = replace(document, ':', ': ')")
    with ResultStore.open(filled) as store:
        assert (len(store.bests()), len(store.trials())) == (len(bests), len(bests))
        assert not caplog.records
    sql(filled, """UPDATE shape SET document = replace(document, '"batch":2', '"batch":3')""")
    with ResultStore.open(filled) as store:
        assert store.bests() == store.trials() == []
    assert "not as they were written" in caplog.text


def test_an_older_store_gets_its_checksums(
    filled: Path, bests: list[Best], kernel_best: KernelBest, tmp_path: Path
) -> None:
    expected = {record_checksum(best) for best in [*bests, kernel_best]}
    make_older(filled, "0004")
    assert len(SqliteRows(filled).read(kernel_best.device)) == 5  # production reads it as it is
    assert len(SqliteRows(filled, USER_DISPATCH).read(kernel_best.device)) == 1
    with ResultStore.open(filled) as store:
        assert store.health().schema_version == CURRENT
        assert len(store.bests()) == len(store.trials()) == 5
    assert {row[0] for row in sql(filled, "SELECT checksum FROM best")} == expected
    assert {row[0] for row in sql(filled, "SELECT served_checksum FROM best")} == set(
        map(served_checksum, [*bests, kernel_best])
    )
    assert sql(filled, "SELECT checksum FROM user_dispatch") == [(served_checksum(kernel_best),)]
    for table in ("device", "trial"):
        assert sql(filled, f"SELECT count(*) FROM {table} WHERE checksum IS NULL") == [(0,)]


def test_a_row_that_was_broken_before_gets_none(filled: Path) -> None:
    make_older(filled, "0004")
    sql(filled, "UPDATE best SET origin = 'guessed' WHERE id = 1")
    ResultStore.open(filled).close()
    assert sql(filled, "SELECT count(*) FROM best WHERE checksum IS NULL") == [(1,)]


def test_an_imported_trial_keeps_its_checksum(filled: Path, trial: Trial) -> None:
    with ResultStore.open(filled) as store:
        store.merge([Results(trials=(replace(trial, kernel_hash="f" * 16),))], trust=False)
        assert sum(trial.imported for trial in store.trials()) == 1


@pytest.fixture
def export(tmp_path: Path, bests: list[Best], trial: Trial) -> Path:
    save_document(document_from(bests[0].device, bests, [trial]), tmp_path / "export.json")
    return tmp_path / "export.json"


def edited(export: Path, kind: str, name: str, value: Any) -> Any:
    document = json.loads(export.read_text())
    document[kind][0][name] = value
    export.write_text(json.dumps(document))
    return document


@pytest.mark.parametrize(
    ("kind", "name"), [("bests", "time_us"), ("bests", "speedup_low"), ("trials", "bench_seconds")]
)
def test_a_changed_row_of_an_export_is_named(export: Path, kind: str, name: str) -> None:
    document = edited(export, kind, name, 1.25)
    with pytest.raises(ImportRejectedError, match=rf"{kind}\[0\]\.checksum"):
        records_from(document)
    del document[kind][0]["checksum"]  # changed on purpose
    records_from(document)


def test_a_changed_row_of_an_export_is_not_served(export: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(rows_in_file(export)) == 5
    edited(export, "bests", "time_us", 1.25)
    assert len(rows_in_file(export)) == 4
    assert "`bests[0]`" in caplog.text


def test_a_device_says_what_it_said(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copyfile(filled, filled.with_name("name.db"))
    change_one(filled, "device", "document")
    with ResultStore.open(filled) as store:
        assert store.devices() == []
    assert "`device`" in caplog.text
    change_one(filled.with_name("name.db"), "device", "key")
    with ResultStore.open(filled.with_name("name.db")) as store:
        assert store.devices() == []
        assert not store.health().sound
