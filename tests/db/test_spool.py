"""A search outlives its database: what it measures is in a file first, and in the store when that answers."""

import errno
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db import recorder as recorder_module
from blocktune.db import spool as spool_module
from blocktune.db.recorder import Recorder, fold_left
from blocktune.db.records.records import Best, Trial
from blocktune.db.spool import Spool, left_files, left_records
from blocktune.db.store import ResultStore
from blocktune.db.tables.location import StoreTarget
from blocktune.kernels.values.errors import StoreError

SEARCH = """
import sys
from pathlib import Path
from tools.stores.killed_locked import search
search(Path(sys.argv[1]), int(sys.argv[2]), sys.stdout.fileno())
"""
"""It says the number of each measurement that was acknowledged."""


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(recorder_module, "IMPATIENT_SECONDS", 0.1)
    monkeypatch.setattr(recorder_module, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def short(sqlite_store: ResultStore) -> ResultStore:
    """The store with writers that wait for a moment only."""
    return sqlite_store.with_timeout(0.2)


def numbered(trial: Trial, number: int) -> Trial:
    return replace(trial, config=replace(trial.config, extra=(("n", number),)))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def spools(path: Path) -> list[Path]:
    return left_files(StoreTarget.of(path))


def lines_of(path: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in spools(path))


def test_what_is_stored_leaves_no_file(short: ResultStore, path: Path, trial: Trial, best: Best) -> None:
    with Recorder(short) as recorder:
        recorder.record(trial)
        assert recorder.set_best(best)
        assert not recorder.set_best(replace(best, created_at=best.created_at.replace(year=2025)))
        assert short.trials() == [trial]
        assert lines_of(path) == 0
    assert spools(path) == []
    assert short.bests() == [best]


def test_a_locked_store_costs_no_measurement(short: ResultStore, path: Path, trial: Trial, best: Best) -> None:
    trials = [numbered(trial, number) for number in range(5)]
    with Recorder(short) as recorder:
        with locked(path):
            for each in trials[:3]:
                started = time.monotonic()
                recorder.record(each)
                assert time.monotonic() - started < 20  # other writers wait 30 s
            assert recorder.set_best(best)
            assert short.trials() == []
            assert lines_of(path) == 4
        time.sleep(0.1)
        for each in trials[3:]:
            recorder.record(each)
    assert short.trials() == trials
    assert short.bests() == [best]
    assert spools(path) == []


@pytest.mark.parametrize("kind", ["", "kernel_"])
def test_a_store_that_stays_locked_gets_them_later(
    short: ResultStore, path: Path, kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    trial, best = (request.getfixturevalue(f"{kind}{name}") for name in ("trial", "best"))
    with locked(path), Recorder(short) as recorder:
        recorder.record(trial)
        recorder.set_best(best)
    assert "2 measurements wait in" in caplog.text
    assert short.trials() == []
    left = fold_left(short)
    assert (left.trials, left.bests, left.unreadable) == ((trial,), (best,), 0)
    assert short.all_trials() == [trial]
    assert short.all_bests() == [best]
    assert spools(path) == []


def test_the_next_search_knows_what_the_killed_one_measured(short: ResultStore, path: Path, trial: Trial) -> None:
    with locked(path), Recorder(short) as recorder:
        recorder.record(trial)
    with Recorder(short):
        assert short.trials() == [trial]


def test_a_store_that_is_away_costs_no_measurement(short: ResultStore, path: Path, trial: Trial) -> None:
    away = path.with_name("away.db")
    with Recorder(short) as recorder:
        path.rename(away)
        recorder.record(trial)
        assert lines_of(path) == 1
        away.rename(path)
        time.sleep(0.05)
        recorder.record(numbered(trial, 1))
        assert lines_of(path) == 0
    assert len(short.trials()) == 2


def refuse_all_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)


def test_a_full_disk_is_waited_for_in_memory(
    short: ResultStore, path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(short) as recorder:
        with locked(path), monkeypatch.context() as patch:
            refuse_all_writes(patch)
            recorder.record(trial)
        assert "No space left" in caplog.text
        assert lines_of(path) == 0
    assert short.trials() == [trial]


def test_what_nothing_takes_is_said(
    short: ResultStore, path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_all_writes(monkeypatch)
    with locked(path), pytest.raises(StoreError, match="1 measurements are lost"), Recorder(short) as recorder:
        recorder.record(trial)


def test_another_folder_takes_what_the_stores_own_does_not(
    short: ResultStore, path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = spool_module.tempfile.mkstemp

    def only_elsewhere(dir: Path, prefix: str, suffix: str) -> tuple[int, str]:
        if dir == path.parent:
            raise PermissionError(13, "Permission denied")
        return real(dir=dir, prefix=prefix, suffix=suffix)

    monkeypatch.setattr(spool_module.tempfile, "mkstemp", only_elsewhere)
    with locked(path), Recorder(short) as recorder:
        recorder.record(trial)
    (file,) = spools(path)
    assert file.parent.name == "blocktune"
    assert fold_left(short).trials == (trial,)


@pytest.mark.parametrize("cut", [1, 2, 100, 1500])
def test_a_torn_line_costs_itself(short: ResultStore, path: Path, trial: Trial, cut: int) -> None:
    trials = [numbered(trial, number) for number in range(3)]
    with locked(path), Recorder(short) as recorder:
        for each in trials:
            recorder.record(each)
    (file,) = spools(path)
    file.write_bytes(file.read_bytes()[:-cut])
    left = fold_left(short)
    torn = cut > 1  # without its last sign, which ends it, a line is whole
    assert left.unreadable == torn
    assert left.trials == tuple(trials[: 3 - torn])


def test_a_changed_line_is_left_out(short: ResultStore, path: Path, trial: Trial) -> None:
    with locked(path), Recorder(short) as recorder:
        recorder.record(trial)
    (file,) = spools(path)
    file.write_text(file.read_text().replace('"time_us":99.5', '"time_us":98.5'))
    left = fold_left(short)
    assert (left.trials, left.unreadable) == ((), 1)


def test_what_a_living_process_writes_is_left_to_it(short: ResultStore, path: Path, trial: Trial) -> None:
    with locked(path), Recorder(short) as recorder:
        recorder.record(trial)
        (file,) = spools(path)
        with left_records(file) as left:
            assert left is None
        assert file.exists()


def test_files_are_private_and_bounded(
    short: ResultStore, path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_BYTES", 3000)
    with locked(path), Recorder(short) as recorder:
        recorder.record(trial)
        (file,) = spools(path)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with pytest.raises(StoreError, match="measurements that may wait for their database"):
            recorder.record(numbered(trial, 1))
        assert file.stat().st_size <= 3000


def test_a_file_that_others_may_write_is_not_believed(
    short: ResultStore, path: Path, trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    with locked(path), Recorder(short) as recorder:
        recorder.record(trial)
    (file,) = spools(path)
    file.chmod(0o666)
    assert fold_left(short).is_empty
    assert file.exists()
    assert "Another user can change" in caplog.text


@pytest.mark.few(1)
@pytest.mark.parametrize("is_locked", [True, False])
def test_a_killed_search_loses_nothing_that_it_said(
    short: ResultStore, path: Path, trial: Trial, is_locked: bool
) -> None:
    short.record(trial)
    firsts = (0, 1000)
    said = []
    for first in firsts:  # two at once
        command = [sys.executable, "-c", SEARCH, str(path), str(first)]
        said.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    with locked(path) if is_locked else closing(sqlite3.connect(path)):
        last = [[int(child.stdout.readline()) for _ in range(20)][-1] for child in said if child.stdout]
        for child in said:
            child.send_signal(signal.SIGKILL)
            child.wait()
            if child.stdout:
                child.stdout.close()
    fold_left(short)
    numbers = {dict(trial.config.extra).get("n") for trial in short.trials()}
    for first, number in zip(firsts, last, strict=True):
        assert set(range(first, number + 1)) <= numbers
    assert spools(path) == []


def test_a_spool_of_a_server_is_in_the_state_directory(trial: Trial, tmp_path: Path) -> None:
    target = StoreTarget.of("postgresql+psycopg://user:secret@nowhere/results")
    spool = Spool(target)
    spool.keep(trial)
    assert spool.path is not None
    assert spool.path.parent == tmp_path / "state" / "blocktune"
    assert "secret" not in spool.path.read_text()
    spool.close()
    with left_records(spool.path) as left:
        assert left is not None
        assert left.trials == (trial,)


def failing(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_cannot_be_emptied_is_stored_once_more(
    short: ResultStore, path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [numbered(trial, number) for number in range(3)]
    with monkeypatch.context() as disk, Recorder(short) as recorder:
        disk.setattr(os, "ftruncate", failing)
        for each in trials:
            recorder.record(each)
    assert short.trials() == trials
    assert lines_of(path) == 3
    assert fold_left(short).trials == tuple(trials)
    assert short.trials() == trials
    assert spools(path) == []


def test_a_file_that_cannot_be_removed_is_named(
    short: ResultStore, path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(StoreTarget.of(path))
    spool.keep(trial)
    spool.close()
    with monkeypatch.context() as disk:
        disk.setattr(os, "unlink", failing)
        disk.setattr(Path, "unlink", failing)
        fold_left(short)
    assert "are stored, but the file cannot be removed" in caplog.text
    assert short.trials() == [trial]
