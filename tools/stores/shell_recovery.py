"""Compares `tune doctor --recover` with `.recover` of SQLite's own shell: shell_recovery.py SHELL COPIES FILE

Copies of stores are damaged as in a drill and read by both; what the shell writes is read by the same rules as a store.
A shell needs SQLITE_ENABLE_DBPAGE_VTAB. That of Debian 12 lacks it and ends with an error, even for a sound file.
"""

import json
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktune.db.exchange.merging import Results
from blocktune.db.recovery.drill import DAMAGES
from blocktune.db.recovery.salvage import Salvaged, salvage_rows, table_of
from blocktune.db.store import ResultStore
from blocktune.tuner.measure.environment import source_commit
from tests.support.stores.sample_records import sample_trials, winner
from tools.pages.recorded.plain_tables import FORMAT, SCHEMA
from tools.stores.damaged_files import TRIALS

KINDS = (
    *("a flipped bit", "1 byte overwritten", "16 bytes overwritten", "512 bytes overwritten", "a page overwritten"),
    *("a byte of the schema", "a page of zeros", "two pages swapped", "cut short", "a flipped bit"),
)
"""What `DAMAGES` do, in words."""

COLUMNS = (
    "damage",
    "copies",
    "rows",
    "lost by blocktune",
    "lost by SQLite's shell",
    "unknown losses",
    "unknown losses of the shell",
)
HOW = (
    "copies of stores with {trials} trials; a row is lost if it is not read as it was written. The loss of a copy is "
    "unknown if the recovery cannot say how many rows it lost at most; the shell never says it."
)


def main(shell: str, copies: int, out: Path) -> None:
    """Damage that many copies, recover each by both, and write the table."""
    found = {kind: Counter[str]() for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        for number, trials in enumerate(TRIALS):
            content = _store(Path(name) / f"{trials}.db", trials)
            dice, copy = random.Random(number), Path(name) / "copy.db"
            copy.write_bytes(content)
            sound = _rows(salvage_rows(copy))
            for place in range(copies // len(TRIALS)):
                damaged = DAMAGES[place % len(DAMAGES)](content, dice)
                row = found[KINDS[place % len(KINDS)]]
                for left in Path(name).glob("*.db*"):
                    left.unlink()
                copy.write_bytes(damaged)
                ours, shells = salvage_rows(copy), salvage_rows(by_shell(copy, shell))
                row.update(copies=1, rows=sound.total())
                row["ours lost"] += (sound - _rows(ours)).total()
                row["shell lost"] += (sound - _rows(shells)).total()
                row["ours unknown"] += ours.lost_at_most is None
                row["shell unknown"] += 1
    total = sum(found.values(), Counter[str]())
    out.write_text(json.dumps(_document(shell, {**found, "all": total}), indent=1, sort_keys=True) + "\n")


def by_shell(damaged: Path, shell: str) -> Path:
    """Return a fresh store with what `.recover` says of a damaged one: nothing where it sees no database."""
    script = subprocess.run([shell, damaged, ".recover"], capture_output=True).stdout
    fresh = damaged.with_name("recovered.db")
    ResultStore.open(fresh).close()
    with closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
        for statement in _statements(script.decode("utf-8", "replace")):
            with suppress(sqlite3.Error):  # a table that is there, a row that breaks a rule
                connection.execute(statement)
        _place_orphans(connection)
    return fresh


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script one by one: a text in one may have any number of lines."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _place_orphans(connection: sqlite3.Connection) -> None:
    """Move rows whose table the shell does not know into the one that they fit."""
    with suppress(sqlite3.OperationalError):  # it knew the tables of all
        for _, _, count, rowid, _, *values in connection.execute("SELECT * FROM lost_and_found").fetchall():
            table = table_of((None, *values[: count - 1]))
            if table is not None:
                names = [column.name for column in table.columns][:count]
                marks = ", ".join("?" * len(names))
                statement = f"INSERT OR IGNORE INTO {table.name} ({', '.join(names)}) VALUES ({marks})"
                connection.execute(statement, (rowid, *values[: count - 1]))


def _store(path: Path, trials: int) -> bytes:
    """Return the bytes of a store with a winner and that many trials."""
    with ResultStore.open(path) as store:
        store.merge([Results(bests=(winner(),), trials=tuple(sample_trials(trials)))], trust=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


def _rows(found: Salvaged) -> Counter[str]:
    return Counter(map(repr, (*found.trials, *found.bests)))


def _document(shell: str, found: dict[str, Counter[str]]) -> dict[str, Any]:
    version = subprocess.run([shell, "--version"], capture_output=True, text=True, check=True).stdout.split()[0]
    names = ("copies", "rows", "ours lost", "shell lost", "ours unknown", "shell unknown")
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "device": "SQLite files",
        "environment": {"shell": version, "sqlite": sqlite3.sqlite_version},
        "how": HOW.format(trials=", ".join(map(str, TRIALS))),
        "columns": COLUMNS,
        "rows": [[kind, *(f"{row[name]:,}" for name in names)] for kind, row in found.items()],
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
