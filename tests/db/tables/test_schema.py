"""The migrations make what the models say, at little cost, and nothing else."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint, create_engine, inspect
from sqlalchemy.pool import NullPool

from blocktune.db.records.records import Best
from blocktune.db.records.row_checksums import served_checksum
from blocktune.db.store import ResultStore
from blocktune.db.tables.models import Base
from blocktune.db.tables.schema import APPLICATION_ID, CURRENT, VERSION_TABLE
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape


def test_the_migrations_make_what_the_models_say(target: str) -> None:
    ResultStore.open(target).close()
    place = target if "://" in target else f"sqlite:///{target}"
    with create_engine(place, poolclass=NullPool).connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        for name, table in Base.metadata.tables.items():  # alembic does not compare these
            checks = {item.name for item in table.constraints if isinstance(item, CheckConstraint)}
            assert {item["name"] for item in inspect(connection).get_check_constraints(name)} == checks


def test_the_models_name_columns_in_the_order_of_the_file(sqlite_store: ResultStore, path: Path) -> None:
    """What is recovered of a damaged file knows a value by its place in the row alone."""
    with closing(sqlite3.connect(path)) as connection:
        for name, table in Base.metadata.tables.items():
            rows = connection.execute(f"PRAGMA table_info({name})")
            assert [column.name for column in table.columns] == [row[1] for row in rows], name


def test_the_newest_revision_is_the_one_that_is_asked_for() -> None:
    config = Config()
    config.set_main_option("script_location", "blocktune.db:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == CURRENT


def test_the_file_says_whose_it_is(sqlite_store: ResultStore, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [(CURRENT,)]


def test_opening_a_current_store_needs_no_alembic(sqlite_store: ResultStore, path: Path) -> None:
    code = (
        "import sys\n"
        "from blocktune.db.store import ResultStore\n"
        "ResultStore.open(sys.argv[1]).close()\n"
        "sys.exit('alembic' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_the_view_of_the_dispatcher_needs_sqlite_alone(sqlite_store: ResultStore, path: Path, best: Best) -> None:
    import json

    sqlite_store.set_best(best)
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute("SELECT * FROM dispatch WHERE device_key = ?", (best.device.key,)).fetchall()
    assert len(rows) == 1
    assert AttentionShape.from_json(json.loads(rows[0]["shape_json"])) == best.shape
    assert KernelConfig.from_json(json.loads(rows[0]["config_json"])) == best.config
    assert dict(rows[0]) == {
        "device_key": best.device.key,
        "shape_json": rows[0]["shape_json"],
        "config_json": rows[0]["config_json"],
        "kernel_hash": best.kernel_hash,
        "origin": "measured",
        "time_us": 99.5,
        "triton": "3.6.0",
        "ptxas": "12.8.93",
        "torch": "2.11.0",
        "cuda": "13.0",
        "driver": "580.65.06",
        "power_limit_w": 700,
        "checksum": served_checksum(best),
    }


@pytest.mark.parametrize("table", ["trial", "best"])
def test_one_row_for_each_key(sqlite_store: ResultStore, path: Path, best: Best, table: str) -> None:
    unique = [
        set(item["column_names"])
        for item in inspect(create_engine(f"sqlite:///{path}", poolclass=NullPool)).get_unique_constraints(table)
    ]
    key = {"device_id", "shape_id"}
    assert key | ({"kernel_id"} if table == "best" else {"kernel_id", "environment_id", "config_id"}) in unique
