"""Whose place a fresh store takes, and what is left of a recovery that is killed."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.records.records import Trial
from blocktune.db.recovery import rebuild
from blocktune.db.recovery.rebuild import recover
from blocktune.db.recovery.replacing import exchange, fresh_path
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import StoreError
from tests.support.open_folders import let_everyone_through


def store_with_a_broken_row(path: Path, trial: Trial) -> None:
    with ResultStore.open(path) as store:
        store.record(trial)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trial SET compile_seconds = -1")


def test_a_link_stays_a_link_and_the_mode_stays(path: Path, tmp_path: Path, trial: Trial) -> None:
    store_with_a_broken_row(path, trial)
    link = tmp_path / "link.db"
    link.symlink_to(path)
    path.chmod(0o664)
    found = recover(link)
    assert found is not None
    assert found.place == str(path)
    assert Path(found.kept).parent == path.parent
    assert link.is_symlink()
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o664
    with ResultStore.open(link) as store:
        assert store.health().sound


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_stays(path: Path, trial: Trial) -> None:
    store_with_a_broken_row(path, trial)
    os.chown(path, 12345, 12346)
    recover(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)


def test_what_a_killed_recovery_made_is_removed_and_that_of_a_living_one_is_not(path: Path, trial: Trial) -> None:
    store_with_a_broken_row(path, trial)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    dead, living = (path.with_name(f".{path.name}.recovering-{pid}") for pid in (ended.pid, 1))
    for left in (dead, Path(f"{dead}-wal"), living):
        left.write_bytes(b"")
    recover(path)
    assert sorted(each.name for each in path.parent.glob(".*")) == [living.name]


def test_a_recovery_that_is_killed_between_its_steps_loses_no_row_of_the_log(
    path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log was moved, the fresh store has not come: the next recovery reads both."""
    store_with_a_broken_row(path, trial)
    with ResultStore.open(path) as store, closing(sqlite3.connect(path)) as keeps_the_log:
        keeps_the_log.execute("SELECT count(*) FROM trial").fetchone()
        store.record(trial)
        store.record(replace(trial, kernel_hash="e" * 16))
        content, log = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    path.write_bytes(content)
    Path(f"{path}-wal").write_bytes(log)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(4, "killed")))
        with pytest.raises(StoreError, match="killed"):
            exchange(path, _empty(fresh_path(path)))
    assert path.exists(), "there is a store at every moment"
    assert not Path(f"{path}-wal").exists()
    monkeypatch.setattr(rebuild, "_is_damaged", lambda *_: True)
    found = recover(path)
    assert found is not None
    assert found.trials == 2
    assert [Path(found.kept).name] == [each.name for each in path.parent.glob("*.corrupt-*[0-9]")]


def _empty(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_may_not_be_read_is_said(path: Path, trial: Trial, tmp_path: Path) -> None:
    store_with_a_broken_row(path, trial)
    path.chmod(0)
    let_everyone_through(tmp_path)
    os.seteuid(65534)
    try:
        with pytest.raises(StoreError, match="cannot be read"):
            recover(path)
    finally:
        os.seteuid(0)
