"""The comparison with SQLite's own shell counts what the shell's script holds, by a shell that is made for the test."""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from blocktune.db.recovery.salvage import salvage_rows
from tools.stores import shell_recovery

SHELL = f"""#!{sys.executable}
import sqlite3, sys
if sys.argv[1] == "--version":
    print("3.99.0 made for a test")
else:
    try:
        for line in sqlite3.connect(sys.argv[1]).iterdump():
            print(line)
    except sqlite3.Error:
        sys.exit(26)
"""


@pytest.fixture
def shell(tmp_path: Path) -> str:
    """A shell that writes what SQLite reads of a file, and nothing more."""
    path = tmp_path / "shell"
    path.write_text(SHELL)
    path.chmod(0o700)
    return str(path)


def test_both_recoveries_are_counted_on_the_same_copies(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_recovery, "TRIALS", (10,))
    out = tmp_path / "store.recover.table.json"
    shell_recovery.main(shell, 10, out)
    document = json.loads(out.read_text())
    *kinds, total = ([int(cell.replace(",", "")) for cell in row[1:]] for row in document["rows"])
    assert document["environment"]["shell"] == "3.99.0"
    assert [sum(column) for column in zip(*kinds, strict=True)] == total
    copies, rows, lost, lost_by_shell, unknown, unknown_of_shell = total
    assert (copies, rows, unknown_of_shell) == (10, 110, 10)
    assert lost <= lost_by_shell <= rows
    assert unknown < 10


def test_rows_of_lost_tables_are_put_where_they_fit(tmp_path: Path) -> None:
    """`.recover` calls their table lost_and_found, and its columns c0, c1, ..., of which c0 is the empty id."""
    place = tmp_path / "store.db"
    shell_recovery._store(place, 3)
    sound = shell_recovery._rows(salvage_rows(place))
    with closing(sqlite3.connect(place, isolation_level=None)) as connection:
        rows = connection.execute("SELECT * FROM trial").fetchall()
        names = ", ".join(f"c{number}" for number in range(len(rows[0])))
        connection.execute(f"CREATE TABLE lost_and_found (rootpgno, pgno, nfield, id, {names})")
        marks = ", ".join("?" * (4 + len(rows[0])))
        for rowid, *values in rows:
            orphan = (1, 2, 1 + len(values), rowid, None, *values)
            connection.execute(f"INSERT INTO lost_and_found VALUES ({marks})", orphan)
        connection.execute("DELETE FROM trial")
        shell_recovery._place_orphans(connection)
        connection.execute("DROP TABLE lost_and_found")
    assert len(rows) == 3
    assert shell_recovery._rows(salvage_rows(place)) == sound
