"""Stores as older versions left them: made by their migrations, with the rows of a store of today."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from blocktune.db.tables.schema import APPLICATION_ID

_ATTENTION = "shape_id IN (SELECT id FROM today.shape WHERE direction IS NOT NULL)"
_KEPT = {
    "device": "true",
    "environment": "true",
    "kernel": "name NOT LIKE '%:%'",
    "shape": "direction IS NOT NULL",
    "config": "kernel IS NOT NULL",
    "trial": _ATTENTION,
    "best": _ATTENTION,
    "user_trial": "true",
    "user_best": "true",
}
"""Which rows of a table, or of a view that was a table, an older store has there."""


def make_older(path: Path, revision: str) -> None:
    """Puts a store of an older schema in place of one, with its rows as far as that schema can tell them. Rows of
    autotuned kernels have no checksums then."""
    older = path.with_name(f"{path.name}.older")
    migrate(older, revision)
    with closing(sqlite3.connect(older)) as connection:
        connection.execute("ATTACH ? AS today", (str(path),))
        for table, condition in _KEPT.items():
            _copy(connection, table, condition)
        connection.commit()
    for left in (f"{path}-wal", f"{path}-shm"):
        Path(left).unlink(missing_ok=True)
    os.replace(older, path)


def migrate(path: Path, revision: str) -> None:
    """Makes an empty store of an older schema."""
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", "blocktune.db:migrations")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def make_schema_7(path: Path) -> None:
    """Makes a store as version 7 of the schema left it: a trial and a winner of attention, two trials and four winners
    of an autotuned kernel, with the checksums that that version gave them."""
    migrate(path, "0007")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM blocktune_schema")
        connection.executescript(Path(__file__).with_name("schema_7.sql").read_text())


def _copy(connection: sqlite3.Connection, table: str, condition: str) -> None:
    """Copies the rows of a table, where the older store has it."""
    theirs = [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]
    ours = {row[1] for row in connection.execute(f"PRAGMA today.table_info({table})")}
    if table.startswith("user_"):
        ours -= {"checksum", "served_checksum"}
    names = ", ".join(name for name in theirs if name in ours)
    if names:
        connection.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM today.{table} WHERE {condition}")
