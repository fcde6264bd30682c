"""Stores in bad order: what is done to a sound one, and what its reader says then."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from blocktune.kernels.values.errors import (
    ForeignStoreError,
    SchemaTooNewError,
    StoreCorruptError,
    StoreError,
)


def missing(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(20_000))


def overwritten_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100 : len(content)] = random.Random(0).randbytes(len(content) - 100)
    path.write_bytes(content)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def changed_by(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)

    return change


def foreign(path: Path) -> None:
    path.unlink()
    changed_by("CREATE TABLE studies (id)")(path)


def endless(path: Path) -> None:
    """A view that never ends, as a hostile file may have."""
    changed_by("DROP VIEW dispatch")(path)
    columns = (
        "CAST(n AS TEXT) device_key, '' shape_json, '' config_json, '' kernel_hash, '' origin, 1 time_us, '' triton,"
        "'' ptxas, '' driver"
    )
    changed_by(
        f"CREATE VIEW dispatch AS WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT 1 FROM t) SELECT {columns} FROM t"
    )(path)


BAD_STORES: list[tuple[Callable[[Path], None], type[StoreError]]] = [
    (missing, StoreError),
    (directory, StoreError),
    (pipe, StoreError),
    (empty, ForeignStoreError),
    (foreign, ForeignStoreError),
    (random_bytes, StoreCorruptError),
    (overwritten_middle, StoreCorruptError),
    (truncated, StoreCorruptError),
    (changed_by("UPDATE blocktune_schema SET version_num = '0099'"), SchemaTooNewError),
    (changed_by("UPDATE blocktune_schema SET version_num = 'x'"), SchemaTooNewError),
    (changed_by("DROP VIEW dispatch"), ForeignStoreError),
    (endless, ForeignStoreError),
]


@contextmanager
def held_exclusively(path: Path) -> Iterator[None]:
    """While another process holds the store's lock, so that it cannot even be read."""
    hold = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('PRAGMA locking_mode=EXCLUSIVE'); c.execute('PRAGMA journal_mode=DELETE');"
        "c.execute('BEGIN EXCLUSIVE'); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.kill()
