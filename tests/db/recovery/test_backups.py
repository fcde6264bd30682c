"""Backups are made when they should be, three are kept, and the newest sound one can be put in place."""

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.cli.main import app
from blocktune.db.exchange.document import document_from, save_document
from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Best, Trial
from blocktune.db.recovery.restoring import restore
from blocktune.db.store import ResultStore
from blocktune.db.tables import backups
from blocktune.db.tables.backups import KEPT, back_up, backups_of
from blocktune.kernels.values.errors import StoreError, UsageError
from tests.support.command_line import CliRunner
from tests.support.stores.older_stores import make_older


def stored(path: Path) -> list[Best]:
    with ResultStore.open(path, read_only=True) as store:
        return store.bests()


def age(paths: list[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def filled(path: Path, bests: list[Best]) -> Path:
    with ResultStore.open(path) as store:
        store.set_best(bests[0])
    return path


def test_a_day_of_use_makes_one(filled: Path, bests: list[Best]) -> None:
    assert backups_of(filled) == []
    for _ in range(3):
        search(filled)
    (backup,) = backups_of(filled)
    assert stored(backup) == [bests[0]]
    age([backup], 25 * 3600)
    search(filled)
    assert len(backups_of(filled)) == 2


def search(path: Path) -> None:
    with ResultStore.open(path) as store, Recorder(store):
        pass


def test_so_does_a_merge_but_not_each_of_many(filled: Path, bests: list[Best], tmp_path: Path) -> None:
    document = tmp_path / "export.json"
    save_document(document_from(bests[0].device, bests, None), document)
    for command in (["import", str(document)], ["merge", str(document)]):
        assert CliRunner().invoke(app, command, env={"BLOCKTUNE_DB": str(filled)}).exit_code == 0
        assert len(backups_of(filled)) == 1
    assert len(stored(backups_of(filled)[0])) == 1


def test_so_does_an_upgrade(filled: Path) -> None:
    make_older(filled, "0004")
    ResultStore.open(filled).close()
    newest = backups_of(filled)[0]
    with closing(sqlite3.connect(newest)) as connection:
        assert connection.execute("SELECT version_num FROM blocktune_schema").fetchone() == ("0004",)


def test_reading_and_empty_stores_make_none(path: Path) -> None:
    for _ in range(2):
        search(path)
    assert backups_of(path) == []


def test_three_are_kept_and_as_private_as_the_store(filled: Path) -> None:
    filled.chmod(0o600)
    made = [back_up(filled) for _ in range(KEPT + 2)]
    assert backups_of(filled) == made[:1:-1]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in backups_of(filled))
    assert list(filled.parent.glob(".*")) == []


def test_a_clock_that_was_put_back_stops_no_backups(filled: Path) -> None:
    """Their names begin with the time. Those of the future would be the newest ones for good."""
    ahead = [filled.with_name(f"{filled.name}.backup-20990101T00000000000{number}") for number in range(KEPT)]
    for path in ahead:
        path.write_bytes(filled.read_bytes())
    age(ahead, -3600 * 24 * 365 * 20)
    made = [back_up(filled, unless_within_seconds=3600) for _ in range(2)]
    assert made[0] is not None
    assert made[1] is None
    assert backups_of(filled) == [made[0], *ahead[:0:-1]]


def test_a_damaged_store_displaces_no_backup(filled: Path) -> None:
    backup = back_up(filled)
    with closing(sqlite3.connect(filled)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(filled.read_bytes())
    content[4096 * 2 : 4096 * 3] = os.urandom(4096)
    filled.write_bytes(content)
    assert back_up(filled) is None
    assert backups_of(filled) == [backup]


def test_where_none_can_be_made_the_work_goes_on(
    filled: Path, bests: list[Best], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backups, "_copy", full)
    with ResultStore.open(filled) as store, Recorder(store) as recorder:
        recorder.set_best(bests[1])
    assert "No space left" in caplog.text
    assert backups_of(filled) == []
    assert list(filled.parent.glob(".*backing-up")) == []


HOLD = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1000)
"""


def test_one_process_at_a_time_makes_a_backup_and_a_killed_one_hinders_nobody(filled: Path) -> None:
    unfinished = filled.with_name(f".{filled.name}.backing-up")
    unfinished.write_bytes(b"half a backup")
    command = (sys.executable, "-c", HOLD, f"{unfinished}.lock")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert back_up(filled) is None
        assert unfinished.read_bytes() == b"half a backup"
        process.kill()
    journal = unfinished.with_name(f"{unfinished.name}-journal")
    journal.write_bytes(b"of a killed process")
    backup = back_up(filled)
    assert backup is not None
    with closing(sqlite3.connect(backup)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert not unfinished.exists()
    assert not journal.exists()
    assert not Path(f"{unfinished}.lock").exists()


def test_a_lock_that_another_user_has_left_makes_room(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, open_file = filled.with_name(f".{filled.name}.backing-up.lock"), os.open
    lock.touch()

    def of_others(path: str | Path, *arguments: int) -> int:
        if Path(path) == lock and lock.exists():
            raise PermissionError(13, "Permission denied")
        return open_file(path, *arguments)

    monkeypatch.setattr(os, "open", of_others)
    assert back_up(filled) is not None


def test_a_backup_that_another_process_has_finished_meanwhile_is_left_alone(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "_is_at", lambda *_: False)
    unfinished = filled.with_name(f".{filled.name}.backing-up")
    unfinished.write_bytes(b"whole")
    assert back_up(filled) is None
    assert unfinished.read_bytes() == b"whole"


def test_the_newest_backup_takes_the_place_of_a_damaged_store(filled: Path, bests: list[Best], trial: Trial) -> None:
    back_up(filled)
    with ResultStore.open(filled) as store:
        store.set_best(bests[1])
        store.record(trial)
    filled.write_bytes(b"\0" * 8192)
    Path(f"{filled}-wal").unlink(missing_ok=True)
    found = restore(filled)
    assert (found.rows, found.newer) == (1, 0)
    assert stored(filled) == [bests[0]]
    assert Path(found.kept).read_bytes() == b"\0" * 8192


def test_what_came_later_is_kept(filled: Path, bests: list[Best], trial: Trial) -> None:
    back_up(filled)
    newer = replace(bests[0], time_us=90.0, created_at=bests[0].created_at.replace(day=21))
    with ResultStore.open(filled) as store:
        store.set_best(newer)
        store.set_best(bests[1])
        store.record(trial)
    found = restore(filled)
    assert (found.rows, found.newer) == (1, 2)
    assert stored(filled) == [newer, bests[1]]


def test_a_backup_that_is_damaged_is_passed_over(filled: Path, bests: list[Best]) -> None:
    older = back_up(filled)
    newer = back_up(filled)
    assert newer is not None
    newer.write_bytes(b"no database")
    filled.unlink()
    found = restore(filled)
    assert (found.backup, found.kept) == (str(older), "")
    assert stored(filled) == [bests[0]]


def link_loop(path: Path) -> None:
    path.symlink_to(path.name)


def of_everybody(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o666)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, link_loop, of_everybody])
def test_what_others_may_have_put_among_the_backups_is_passed_over(
    make: Callable[[Path], None], filled: Path, bests: list[Best]
) -> None:
    own = back_up(filled)
    filled.write_bytes(b"\0" * 8192)
    Path(f"{filled}-wal").unlink(missing_ok=True)
    make(Path(f"{own}0"))
    assert restore(filled).backup == str(own)
    assert stored(filled) == [bests[0]]


def test_a_backup_that_others_can_write_is_not_made_ours(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backup = back_up(filled)
    assert backup is not None
    backup.chmod(0o666)
    with pytest.raises(StoreError, match="you or root alone can write"):
        restore(filled)
    monkeypatch.setenv("BLOCKTUNE_TRUST_OWNER", "1")
    assert restore(filled).backup == str(backup)


@pytest.mark.parametrize("make", [Path.mkdir, link_loop])
def test_a_place_of_the_lock_that_is_taken_is_said(
    make: Callable[[Path], None], filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(filled.with_name(f".{filled.name}.backing-up.lock"))
    assert back_up(filled) is None
    assert "No backup of" in caplog.text


def test_a_link_in_the_place_of_an_unfinished_backup_leads_nowhere(filled: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("text")
    filled.with_name(f".{filled.name}.backing-up").symlink_to(target)
    backup = back_up(filled)
    assert backup is not None
    assert not backup.is_symlink()
    assert target.read_text() == "text"


BACK_UP = """
import sys
from pathlib import Path
from blocktune.db.tables.backups import back_up
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    back_up(Path(sys.argv[1]))
"""


def backing_up(path: Path, times: int) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-P", "-c", BACK_UP, str(path), str(times)], stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_backups_that_are_killed_leave_whole_ones_alone(filled: Path, bests: list[Best]) -> None:
    for number in range(8):
        with backing_up(filled, 1000) as process:
            time.sleep(0.01 * number)
            process.kill()
        assert [stored(backup) for backup in backups_of(filled)] == [[bests[0]]] * len(backups_of(filled))
    assert back_up(filled) == backups_of(filled)[0]
    assert list(filled.parent.glob(".*")) == []


def test_several_processes_at_once_leave_three_whole_backups(filled: Path, bests: list[Best]) -> None:
    processes = [backing_up(filled, 20) for _ in range(4)]
    for process in processes:
        with process:
            assert process.wait(120) == 0
    assert [stored(backup) for backup in backups_of(filled)] == [[bests[0]]] * KEPT


def test_a_disk_that_is_full_costs_the_backup_alone(filled: Path, bests: list[Best]) -> None:
    script = BACK_UP.replace("import sys", "import resource, sys")
    script = script.replace("for _", "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\nfor _")
    found = subprocess.run([sys.executable, "-P", "-c", script, str(filled), "1"], capture_output=True, text=True)
    assert found.returncode == 0
    assert "No backup of" in found.stderr
    assert backups_of(filled) == []
    assert list(filled.parent.glob(".*backing-up")) == []
    assert stored(filled) == [bests[0]]


def test_a_directory_is_no_store(tmp_path: Path) -> None:
    for place in (Path("/"), tmp_path):
        with pytest.raises(StoreError, match=f"{place} is a directory"):
            restore(place)


def test_without_a_backup_nothing_is_changed(filled: Path) -> None:
    before = filled.read_bytes()
    with pytest.raises(StoreError, match="--recover"):
        restore(filled)
    assert filled.read_bytes() == before
    with pytest.raises(UsageError, match="administrator"):
        restore("postgresql+psycopg://nowhere/results")
