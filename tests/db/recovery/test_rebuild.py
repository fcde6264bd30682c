"""What is saved of damaged stores, and how honest the count of what is not."""

import os
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Outcome, Trial
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.recovery.drill import drill
from blocktune.db.recovery.rebuild import Recovery, recover
from blocktune.db.recovery.restoring import restore
from blocktune.db.recovery.salvage import SMALLEST_ROW_BYTES, salvaged
from blocktune.db.store import ResultStore
from blocktune.db.tables.sqlite_file import connect_sqlite
from blocktune.db.user_store import UserKernelStore
from blocktune.kernels.tuned.config import Problem
from blocktune.kernels.values.errors import (
    ForeignStoreError,
    SchemaTooNewError,
    StoreError,
    StoreLockedError,
    UsageError,
)
from tests.support.filled_stores import filled

FULL = os.environ.get("BLOCKTUNE_FAULTS") == "full"
ROWS_IN_A_PAGE = 4096 // SMALLEST_ROW_BYTES


def files(folder: Path) -> list[str]:
    """Return the names of a folder's files, without those that SQLite keeps next to a store while it is open."""
    return sorted(each.name for each in folder.iterdir() if not each.name.endswith(("-wal", "-shm")))


def test_a_sound_store_is_left_alone(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 3)
    before = path.read_bytes()
    assert recover(path) is None
    assert path.read_bytes() == before
    assert files(path.parent) == [path.name]


def table_pages(path: Path, table: str) -> list[int]:
    """The leaf pages of a table, by their first bytes and what is on them."""
    data = path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    page = data[(root - 1) * 4096 : root * 4096]
    assert page[0] == 5  # an interior page: its cells name the children
    count = int.from_bytes(page[3:5], "big")
    cells = [int.from_bytes(page[12 + 2 * n : 14 + 2 * n], "big") for n in range(count)]
    return [*(int.from_bytes(page[cell : cell + 4], "big") for cell in cells), int.from_bytes(page[8:12], "big")]


@pytest.mark.parametrize("which", [0, 3, -1], ids=["first page", "a page within", "last page"])
def test_rows_around_a_damaged_page_are_saved(path: Path, best: Best, trial: Trial, which: int) -> None:
    trials = filled(path, best, trial, 90)
    page = table_pages(path, "trial")[which]
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = random.Random(0).randbytes(4096)
    path.write_bytes(data)
    found = recover(path)
    assert found is not None
    assert found.bests == 1
    assert 70 <= found.trials < 90
    assert found.lost_at_least == 0  # nothing of the page is readable, so what stood there is a matter of its size
    assert found.lost_at_most is not None
    assert 90 <= found.trials + found.lost_at_most <= 90 + ROWS_IN_A_PAGE
    assert Path(found.kept).read_bytes() == data
    with ResultStore.open(path) as store:
        assert store.bests() == [best]
        saved = store.trials()
        assert store.health().sound
    assert len(saved) == found.trials
    assert all(each in trials for each in saved)
    assert files(path.parent) == sorted([path.name, Path(found.kept).name])


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


def test_rows_of_tuned_functions_are_saved_by_their_rules(
    path: Path, trial: Trial, best: Best, user_trial: UserTrial, user_best: UserBest
) -> None:
    filled(path, best, trial, 3)
    hostile = replace(user_best, source_hash="f" * 16)
    with UserKernelStore.open(path) as users:
        users.restore([user_trial], [user_best, hostile])
    with closing(sqlite3.connect(path)) as connection, connection:
        text = "x\n    0: __import__('os').system('id'),#"
        connection.execute("UPDATE user_best SET source_hash = ? WHERE source_hash = ?", (text, hostile.source_hash))
    found = recover(path)
    assert found is not None
    assert (found.bests, found.trials, found.user_rows, found.lost_at_most) == (1, 3, 2, 1)
    with UserKernelStore.open(path) as users:
        assert users.bests(user_best.device) == [user_best]
        key = (user_trial.source_hash, user_trial.problem, user_trial.environment)
        assert users.trials(user_trial.device, user_trial.config.kernel, *key) == [user_trial]


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


@dataclass(frozen=True)
class Sound:
    """A store in good order: its bytes, and how many trials and winners are in it."""

    content: bytes
    rows: int


@pytest.fixture(scope="module")
def sound(
    tmp_path_factory: pytest.TempPathFactory, best: Best, trial: Trial, user_trial: UserTrial, user_best: UserBest
) -> Sound:
    """A store of 200 trials, some with texts that take pages of their own, and 60 winners; as many of a function's."""
    path = tmp_path_factory.mktemp("sound") / "blocktune.db"
    trials = [
        replace(
            trial,
            config=replace(trial.config, extra=(("n", n),)),
            outcome=Outcome.RUN_ERROR,
            time_us=None,
            error="e" * (9000 if n % 20 == 0 else n),
        )
        for n in range(200)
    ]
    bests = [replace(best, shape=replace(best.shape, seqlen_q=64 * (1 + n))) for n in range(60)]
    problems = [Problem((("n", n), ("name", "x" * n))) for n in range(60)]
    with ResultStore.open(path) as store:
        store.merge([Results(bests=tuple(bests), trials=tuple(trials))], trust=True)
    with UserKernelStore.open(path) as users:
        user_bests = [replace(user_best, problem=problem) for problem in problems]
        users.restore([replace(user_trial, problem=problem) for problem in problems], user_bests)
    return Sound(path.read_bytes(), 200 + 60 + 60 + 60)


def recovered(path: Path, content: bytes) -> Recovery | None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return recover(path)


def rows_of(path: Path) -> int:
    """How many trials and winners a sound store holds."""
    with ResultStore.open(path) as store:
        health = store.health()
    assert health.sound
    return sum(health.rows[name] for name in ("trial", "best", "user_trial", "user_best"))


def flipped(content: bytes, dice: random.Random) -> bytes:
    """With a bit, some bytes or some hundred bytes overwritten."""
    damaged = bytearray(content)
    size = dice.choice([1, 1, 4, 16, 64, 1024, 4096])
    start = dice.randrange(len(damaged) - size)
    if size == 1 and dice.random() < 0.5:
        damaged[start] ^= 1 << dice.randrange(8)
    else:
        damaged[start : start + size] = dice.randbytes(size)
    return bytes(damaged)


@pytest.mark.parametrize(
    ("seed", "damages"),
    [*((seed, 25) for seed in range(12))] if FULL else [(0, 4), pytest.param(0, 12, marks=pytest.mark.exhaustive)],
)
def test_random_damage_never_costs_more_rows_than_it_says(
    tmp_path: Path, sound: Sound, seed: int, damages: int
) -> None:
    dice, unreadable = random.Random(seed), 0
    for number in range(damages):
        path = tmp_path / f"{number}" / "blocktune.db"
        content = flipped(sound.content, dice)
        try:
            found = recovered(path, content)
        except (ForeignStoreError, SchemaTooNewError):  # the damage hit a name or the version
            assert path.read_bytes() == content
            unreadable += 1
            continue
        if found is None:
            assert rows_of(path) == sound.rows
            continue
        assert Path(found.kept).read_bytes()[:100] == content[:100]
        lost = sound.rows - rows_of(path)
        assert 0 <= found.lost_at_least <= lost
        # with a row's page go the pages of its long text, which might have held rows as well
        assert found.lost_at_most is None or lost <= found.lost_at_most <= lost + 8 * ROWS_IN_A_PAGE
    assert unreadable <= 2


@pytest.mark.few(2)
@pytest.mark.parametrize("table", ["user_trial", "trial", "device", "blocktune_schema", "environment"])
def test_a_damaged_definition_of_a_table_costs_no_row(tmp_path: Path, sound: Sound, table: str) -> None:
    damaged = bytearray(sound.content)
    damaged[damaged.find(f"CREATE TABLE {table}".encode()) + 3] = 255
    path = tmp_path / "blocktune.db"
    found = recovered(path, bytes(damaged))
    assert found is not None
    assert (found.lost_at_least, found.lost_at_most) == (0, 0)
    assert rows_of(path) == sound.rows


@pytest.mark.parametrize("size", [100, 4096], ids=["header", "first page"])
def test_without_a_schema_nothing_is_lost(tmp_path: Path, sound: Sound, size: int) -> None:
    path = tmp_path / "blocktune.db"
    found = recovered(path, b"\xa7" * size + sound.content[size:])
    assert found is not None
    assert rows_of(path) == sound.rows
    assert found.lost_at_least == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("table", "column"), [("environment", "torch"), ("device", "name"), ("best", "gpu_uuid"), ("trial", "error")]
)
def test_a_byte_that_is_no_text_is_named_and_recovered(
    tmp_path: Path, sound: Sound, caplog: pytest.LogCaptureFixture, table: str, column: str
) -> None:
    path = tmp_path / "blocktune.db"
    path.write_bytes(sound.content)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = CAST(x'3132ff' AS TEXT) WHERE id = 1")
    with ResultStore.open(path) as store:
        health = store.health()
        assert not health.sound
        assert f"a row of {table} breaks a rule" in health.integrity
        kept = len(store.trials()) + len(store.bests())
        assert table == "device" or "are not as they were written and are left out" in caplog.text
    found = recover(path)
    assert found is not None
    assert found.lost_at_least == found.lost_at_most == sound.rows - rows_of(path)
    with ResultStore.open(path) as store:
        assert len(store.trials()) + len(store.bests()) == kept


def test_rows_that_refer_to_nothing_are_named_and_counted(tmp_path: Path, sound: Sound) -> None:
    path = tmp_path / "blocktune.db"
    path.write_bytes(sound.content)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM shape WHERE id IN (SELECT shape_id FROM best LIMIT 5)")
    with ResultStore.open(path) as store:
        assert "links between rows lead nowhere" in store.health().integrity
    found = recover(path)
    assert found is not None
    lost = sound.rows - rows_of(path)
    assert found.lost_at_least == found.lost_at_most == lost >= 5


def test_a_file_that_was_cut_off_leaves_its_losses_open(tmp_path: Path, sound: Sound) -> None:
    path = tmp_path / "blocktune.db"
    found = recovered(path, sound.content[: len(sound.content) - 10 * 4096])
    assert found is not None
    assert found.lost_at_most is None
    assert 0 < rows_of(path) < sound.rows
    assert found.losses.startswith(f"at least {found.lost_at_least} are lost; how many more is unknown")


def test_a_page_of_the_wrong_kind_is_read_as_what_it_is(tmp_path: Path, path: Path, best: Best, trial: Trial) -> None:
    trials = filled(path, best, trial, 90)
    content = bytearray(path.read_bytes())
    for page in table_pages(path, "trial"):
        content[(page - 1) * 4096] = 0x0A
    found = recovered(tmp_path / "damaged" / "blocktune.db", bytes(content))
    assert found is not None
    assert (found.bests, found.trials, found.lost_at_most) == (1, len(trials), 0)


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
    content[content.find(b"CREATE TABLE user_trial") + 3] = 255
    first_page = log.find(b"CREATE TABLE user_trial")  # SQLite would take a page of the log for the one in the file
    assert first_page < 0
    if spoil:
        log[len(log) * 3 // 4] ^= 1
    copy.write_bytes(content)
    Path(f"{copy}-wal").write_bytes(log)
    found = salvaged(copy)
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
    found = salvaged(path)
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
    found = salvaged(path)
    assert (len(found.bests), len(found.trials), found.lost_at_least) == (1, 90, 0)


def test_a_store_of_the_first_schema_is_read(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 5)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE environment DROP COLUMN regime")
    found = salvaged(path)
    assert (found.bests, len(found.trials), found.lost_at_most) == ((best,), 5, 0)


def test_a_newer_store_is_not_recovered_by_an_older_blocktune(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 5)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE blocktune_schema SET version_num = '9999'")
    content = bytearray(path.read_bytes())
    content[content.find(b"CREATE TABLE user_trial") + 3] = 255
    path.write_bytes(content)
    with pytest.raises(SchemaTooNewError, match="9999"):
        recover(path)
    assert path.read_bytes() == content


def test_a_pipe_is_no_store(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(StoreError, match="must be a file"):
        recover(path)


def test_a_lock_is_no_damage(path: Path, best: Best, trial: Trial) -> None:
    filled(path, best, trial, 3)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreLockedError):
            recover(path, lock_timeout_seconds=0.1)
    assert files(path.parent) == [path.name]


def test_what_cannot_be_recovered_is_refused(tmp_path: Path) -> None:
    export = tmp_path / "h200.txt"
    export.write_text('{"format": "blocktune-results"}\n')
    with pytest.raises(ForeignStoreError, match="is a text file"):
        recover(export)
    assert files(tmp_path) == ["h200.txt"]
    with pytest.raises(UsageError, match="results file by its name"):
        recover(tmp_path / "h200.json")
    with pytest.raises(UsageError, match="Only a SQLite file"):
        recover("postgresql+psycopg://user:secret@host/name")
    with pytest.raises(StoreError, match="there is no"):
        recover(tmp_path / "missing.db")


def test_a_name_that_no_file_can_have_is_refused_in_words() -> None:
    for act in (recover, restore, drill):
        with pytest.raises(StoreError, match="File name too long"):
            act("x" * 5000)
