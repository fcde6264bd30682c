"""One name, one file: whatever links, blanks and homes are on the way, commands and production mean the same store."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from blocktune.db.records.records import Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.store_reader.places import user_place
from blocktune.runtime.store_reader.sources import UserConfigs
from tests.support.open_folders import let_everyone_through

H200 = device_named("h200")


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("sqlite:///{tmp}/my%20store.db", "my store.db"),
        ("sqlite:///{tmp}/p%2541.db", "p%41.db"),
        ("sqlite+pysqlite:///{tmp}/x.db", "x.db"),
        ("{tmp}/q?x.db", "q?x.db"),
        ("{tmp}/p%41.db", "p%41.db"),
        ("{tmp}/link/../x.db", "elsewhere/x.db"),
        ("link/../x.db", "elsewhere/x.db"),
        ("sqlite:///x.db", "x.db"),
    ],
)
def test_commands_and_production_read_one_file(
    named: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "inner")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOCKTUNE_DB", named.format(tmp=tmp_path))
    target = StoreTarget.of(None)
    assert target.path == tmp_path / meant == Path(os.path.realpath(user_place()))
    ResultStore.open().close()
    assert (tmp_path / meant).exists()
    assert UserConfigs().configs(H200) == []  # it is a store, so there is nothing to complain about


@pytest.mark.parametrize(
    "named", ["sqlite://", "sqlite:///", "sqlite:///x.db?mode=ro", "sqlite://host/x.db", "://x.db"]
)
def test_what_names_no_file_is_refused_by_both(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", named)
    with pytest.raises(UsageError):
        StoreTarget.of(None)
    with pytest.raises(StoreError):
        user_place()


@pytest.mark.parametrize("named", [None, "~/x.db", "~nouser-of-this-name/x.db"])
def test_a_home_that_is_unknown_or_relative_is_refused(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "here")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    if named is not None:
        monkeypatch.setenv("BLOCKTUNE_DB", named)
    with pytest.raises(UsageError, match="home directory"):
        StoreTarget.of(None)
    with pytest.raises(StoreError, match="home directory"):
        user_place()


def test_a_name_that_is_too_long_is_said(tmp_path: Path) -> None:
    for enter in (ResultStore.open, ResultStore.open_to_read):
        with pytest.raises(StoreError, match="too long"):
            enter(tmp_path / ("n" * 300))
    with pytest.raises(StoreError, match="too long"):
        _ = StoreTarget.of(tmp_path / ("n" * 300)).is_missing


def waiting_rows(folder: Path, trial: Trial) -> Path:
    """A store with a trial that waits in its log, as a killed writer leaves it."""
    source, path = folder / "source.db", folder / "real" / "blocktune.db"
    path.parent.mkdir()
    with ResultStore.open(source) as store, closing(sqlite3.connect(source)) as keeps_the_log:
        keeps_the_log.execute("SELECT count(*) FROM trial").fetchone()
        store.record(trial)
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{source}{suffix}", f"{path}{suffix}")
    return path


READER = """
import os, resource, sys
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.runtime.store_reader.store_file import SqliteRows
from blocktune.kernels.values.errors import StoreError
from pathlib import Path
limit, user, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device_named("h200")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)) if limit >= 0 else None
os.seteuid(user)
try:
    with ResultStore.open_to_read(path) as store:
        print(len(store.trials()), len(SqliteRows(Path(path)).read(device_named("h200"))))
except StoreError as error:
    print(error)
"""


def read_by_another(path: Path, *, user: int | None = None, file_bytes: int = -1) -> str:
    """Return what a process says that runs as this user, or may write files of up to `file_bytes` only."""
    arguments = [str(file_bytes), str(os.geteuid() if user is None else user), str(path)]
    command = [sys.executable, "-P", "-c", READER, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_rows_that_wait_are_not_passed_over_through_a_link(
    trial: Trial, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("links")
    let_everyone_through(folder)
    path = waiting_rows(folder, trial)
    link = folder / "link.db"
    link.symlink_to(path)
    path.parent.chmod(0o555)
    assert "rows wait in blocktune.db-wal" in read_by_another(link, user=65534)


def test_a_full_disk_can_be_read(path: Path, trial: Trial) -> None:
    with ResultStore.open(path) as store:
        store.record(trial)
    assert read_by_another(path, file_bytes=0) == "1 0"


def test_a_full_disk_with_rows_that_wait_is_said(tmp_path: Path, trial: Trial) -> None:
    assert "free space" in read_by_another(waiting_rows(tmp_path, trial), file_bytes=0)
