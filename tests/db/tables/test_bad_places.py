"""Files that are no store, stores that cannot be used as they are, and what the errors say about them."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables import sqlite_file
from blocktune.kernels.values.errors import ForeignStoreError, SchemaTooNewError, StoreCorruptError, StoreError

NOBODY = 65534


def run_sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def optuna_study(path: Path) -> None:
    run_sql(
        path,
        "CREATE TABLE studies (study_id INTEGER PRIMARY KEY, study_name TEXT)",
        "CREATE TABLE alembic_version (version_num TEXT)",
        "INSERT INTO alembic_version VALUES ('v3.2.0.a')",
    )


def application(path: Path) -> None:
    run_sql(path, "PRAGMA application_id = 252006675")


def text(path: Path) -> None:
    path.write_text("This is no database, it is a long enough text about one.\n" * 100)


def random_bytes(path: Path) -> None:
    path.write_bytes(bytes((index * 7919) % 251 for index in range(20_000)))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (optuna_study, ForeignStoreError),
        (application, ForeignStoreError),
        (text, StoreCorruptError),
        (random_bytes, StoreCorruptError),
        (Path.mkdir, StoreError),
    ],
)
def test_a_file_of_others_is_named_and_left_alone(
    path: Path, make: Callable[[Path], None], error: type[StoreError], read_only: bool
) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(error, match="--db"):
        ResultStore.open(path, read_only=read_only)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_an_empty_file_becomes_a_store(path: Path, trial: Trial) -> None:
    path.touch()
    with pytest.raises(StoreError, match="holds no tables yet"):
        ResultStore.open(path, read_only=True)
    with ResultStore.open(path) as store:
        store.record(trial)
        assert store.trials() == [trial]


def test_a_missing_file_cannot_be_read(path: Path) -> None:
    with pytest.raises(StoreError, match="`tune run` creates it"):
        ResultStore.open(path, read_only=True)
    assert not path.exists()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_schema_is_not_touched(path: Path, read_only: bool) -> None:
    ResultStore.open(path).close()
    run_sql(path, "UPDATE blocktune_schema SET version_num = '0999'")
    with pytest.raises(SchemaTooNewError, match="pip install --upgrade blocktune"):
        ResultStore.open(path, read_only=read_only)


@pytest.mark.parametrize("statement", ["DELETE FROM blocktune_schema", "UPDATE blocktune_schema SET version_num = 'x'"])
def test_a_version_that_cannot_be_read(path: Path, statement: str) -> None:
    ResultStore.open(path).close()
    run_sql(path, statement)
    with pytest.raises(StoreCorruptError, match="one revision number"):
        ResultStore.open(path)


def test_a_full_disk_loses_nothing_that_was_stored(path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResultStore.open(path) as store:
        store.record(trial)
        pages = path.stat().st_size // 4096
        full = (*sqlite_file.CONNECTION_PRAGMAS, f"PRAGMA max_page_count = {pages}")
        monkeypatch.setattr(sqlite_file, "CONNECTION_PRAGMAS", full)
        with pytest.raises(StoreError, match=r"The disk of .* is full"):
            store.record(replace(trial, kernel_hash="f" * 16, error="x" * 100_000))
        assert store.trials() == [trial]
        assert store.health().integrity == "ok"


def test_a_truncated_store_is_reported(sqlite_store: ResultStore, path: Path, trial: Trial) -> None:
    sqlite_store.record(trial)
    path.write_bytes(path.read_bytes()[: 4096 * 3])
    with pytest.raises(
        StoreCorruptError, match="is not a sound SQLite database \\(database disk image is malformed\\)"
    ):
        ResultStore.open(path).trials()


def test_health_names_the_damage(sqlite_store: ResultStore, path: Path, trial: Trial) -> None:
    sqlite_store.record(trial)
    run_sql(path, "PRAGMA ignore_check_constraints = ON", "UPDATE trial SET time_us = -1")
    health = sqlite_store.health()
    assert not health.sound
    assert health.integrity == "CHECK constraint failed in trial"


def test_a_row_that_blocktune_never_wrote_is_reported(sqlite_store: ResultStore, path: Path, trial: Trial) -> None:
    sqlite_store.record(trial)
    run_sql(path, """UPDATE config SET document = '{"kernel": "flash_fwd", "ir_override": "/tmp/x"}'""")
    run_sql(path, "UPDATE trial SET checksum = NULL")
    with pytest.raises(StoreCorruptError, match="blocktune did not write"):
        sqlite_store.trials()


def test_a_file_that_vanishes_is_not_replaced_in_silence(sqlite_store: ResultStore, path: Path, trial: Trial) -> None:
    path.unlink()
    with pytest.raises(StoreError, match="unable to open"):
        sqlite_store.record(trial)
    assert not path.exists()


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A directory that this process can read and not write, while the test runs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        yield directory
        os.seteuid(os.getuid())
        directory.chmod(0o755)


def lose_write_permission(directory: Path) -> None:
    directory.chmod(0o555)
    if os.geteuid() == 0:  # to whom permissions mean nothing
        os.seteuid(NOBODY)


def test_a_store_in_a_read_only_directory_is_read(unwritable: Path, trial: Trial) -> None:
    path = unwritable / "blocktune.db"
    with ResultStore.open(path) as store:
        store.record(trial)
    lose_write_permission(unwritable)
    with ResultStore.open(path, read_only=True) as store:
        assert store.trials() == [trial]
        assert store.health().integrity == "ok"
    with pytest.raises(StoreError, match="permission"), ResultStore.open(path) as store:
        store.record(trial)


def test_rows_in_a_stale_journal_are_not_passed_over(unwritable: Path, tmp_path: Path, trial: Trial) -> None:
    source = tmp_path / "source.db"
    with ResultStore.open(source) as store, closing(sqlite3.connect(source)) as keeps_the_journal:
        keeps_the_journal.execute("SELECT count(*) FROM trial").fetchone()
        store.record(trial)
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{source}{suffix}", f"{unwritable}/blocktune.db{suffix}")
    lose_write_permission(unwritable)
    with pytest.raises(StoreError, match=r"rows wait in blocktune\.db-wal"):
        ResultStore.open(unwritable / "blocktune.db", read_only=True)


def test_a_directory_that_cannot_be_made_is_named(unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(unwritable / "deeper"))
    lose_write_permission(unwritable)
    with pytest.raises(StoreError, match="is not writable"):
        ResultStore.open()


def test_tables_of_others_with_our_names_are_left_alone(new_postgres_database: Callable[[], str]) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    place = new_postgres_database()
    with create_engine(place, poolclass=NullPool).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE trial (id integer)")
    with pytest.raises(ForeignStoreError, match="trial"):
        ResultStore.open(place)


def test_a_folder_that_was_named_is_not_made(tmp_path: Path) -> None:
    place = tmp_path / "misspelt" / "folder" / "results.db"
    with pytest.raises(StoreError, match=f"No such folder: {place.parent}"):
        ResultStore.open(place)
    assert not place.parent.parent.exists()


def test_the_folder_of_the_user_s_own_store_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "fresh" / "home"))
    with ResultStore.open() as store:
        assert store.label == str(tmp_path / "fresh" / "home" / "blocktune" / "blocktune.db")


def test_a_host_that_no_name_can_be_is_said() -> None:
    pytest.importorskip("psycopg", reason="a server needs psycopg")
    with pytest.raises(StoreError, match="Correct the host of the URL"):
        ResultStore.open("postgresql+psycopg://u@h\u202e:1/x", read_only=True)
