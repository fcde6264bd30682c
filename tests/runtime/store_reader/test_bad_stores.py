"""Stores that are damaged, locked or on read-only media: an answer in time, and the right error."""

import math
import random
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import StoreError, StoreLockedError
from blocktune.runtime.store_reader import store_file
from blocktune.runtime.store_reader.background import BackgroundRead
from blocktune.runtime.store_reader.sources import (
    SqliteConfigs,
    read_source,
)
from tests.support.fakes.dispatch_fakes import (
    H200,
    best,
    config,
    shape_like,
    store_with,
)
from tests.support.stores.bad_stores import BAD_STORES, held_exclusively
from tests.support.suite import warm_python

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("plain_kernel")]

SHAPE = shape_like()
ANSWER_SECONDS = 0.05


def answer(path: Path, in_time: float = ANSWER_SECONDS) -> tuple[Exception | None, float]:
    """The reader's error and the fastest of many attempts, since other programs may take the processor away; the first
    that is fast enough is the last."""
    fastest, error = math.inf, None
    for _ in range(40):
        start = time.perf_counter()
        try:
            SqliteConfigs(path).configs(H200)
        except StoreError as caught:
            error = caught
        fastest = min(fastest, time.perf_counter() - start)
        if fastest < in_time:
            break
    return error, fastest


@pytest.mark.parametrize(("damage", "error"), BAD_STORES)
def test_a_bad_store_is_answered_in_time(store: Path, damage: Callable[[Path], None], error: type[StoreError]) -> None:
    damage(store)
    caught, seconds = answer(store)
    assert type(caught) is error
    assert str(store) in str(caught)
    assert seconds < ANSWER_SECONDS


def test_random_damage_never_raises_anything_but_a_store_error(store: Path, tmp_path: Path) -> None:
    sound, dice = store.read_bytes(), random.Random(1)
    for _ in range(100):
        content = bytearray(sound)
        for _ in range(dice.choice([1, 10, 200])):
            content[dice.randrange(len(content))] = dice.randrange(256)
        damaged = tmp_path / "damaged.db"
        damaged.write_bytes(content)
        rows, problems = read_source(SqliteConfigs(damaged), H200)
        assert len(rows) <= 1
        unexpected = [problem for problem in problems if problem.startswith("SqliteConfigs cannot be read")]
        assert unexpected == []


def test_a_locked_store_is_asked_until_its_time_is_over(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "READ_SECONDS", 0.1)
    with held_exclusively(store):
        caught, seconds = answer(store, in_time=0.1 + ANSWER_SECONDS)
    assert type(caught) is StoreLockedError
    assert 2 * store_file.BUSY_SECONDS < seconds < 0.1 + ANSWER_SECONDS  # more than once


def test_a_store_that_is_unlocked_meanwhile_is_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "READ_SECONDS", 60.0)
    with held_exclusively(store):
        reading = BackgroundRead(lambda: SqliteConfigs(store).configs(H200), lambda: None)
        assert reading.value(0.1) is None
    rows = reading.value(store_file.READ_SECONDS)
    assert rows is not None
    assert [row.time_us for row in rows] == [10.0]


def read_as_nobody(path: Path) -> str:
    """What a process that may not write the store's directory reads: the number of rows, or the error."""
    code = (
        "import os, sys; from pathlib import Path; from blocktune.runtime.store_reader.store_file import SqliteRows\n"
        "from blocktune.kernels.hardware.device import device_named; device = device_named('h200')\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: print(len(SqliteRows(Path(sys.argv[1])).read(device)))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    return warm_python.run(command, check=True, cwd="/").stdout.strip()


def test_a_store_on_read_only_media_is_read(open_directory: Path) -> None:
    path = store_with(open_directory / "store.db", best(SHAPE, config()))
    path.chmod(0o444)
    open_directory.chmod(0o555)
    assert read_as_nobody(path) == "1"


def test_rows_that_wait_in_a_log_on_read_only_media_are_not_passed_over_in_silence(open_directory: Path) -> None:
    path = store_with(open_directory / "store.db", best(SHAPE, config()))
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute("UPDATE best SET time_us = 11, served_checksum = NULL")
        for name in ("copy.db", "copy.db-wal"):  # as a backup taken while the store was in use
            shutil.copy(open_directory / name.replace("copy", "store"), open_directory / name)
    for file in open_directory.iterdir():
        file.chmod(0o444)
    open_directory.chmod(0o555)
    assert read_as_nobody(open_directory / "copy.db").startswith("StoreError")
