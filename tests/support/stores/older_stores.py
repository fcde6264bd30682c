"""Stores as older versions left them."""

import importlib
import sqlite3
from contextlib import closing
from pathlib import Path

USER_TELEMETRY = importlib.import_module("blocktune.db.migrations.versions.0007_user_telemetry")
ENERGY = importlib.import_module("blocktune.db.migrations.versions.0006_energy")
CHECKSUMS = importlib.import_module("blocktune.db.migrations.versions.0005_checksums")
POWER_LIMIT = importlib.import_module("blocktune.db.migrations.versions.0003_power_limit")
USER_KERNELS = importlib.import_module("blocktune.db.migrations.versions.0002_user_kernels")


def make_schema_5(path: Path) -> None:
    """Takes the state of the GPU away from trials of a store's tuned functions, and the energies from the others."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for name in USER_TELEMETRY.TELEMETRY:
            connection.execute(f"ALTER TABLE user_trial DROP COLUMN {name}")
        for table, names in ENERGY.ENERGIES.items():
            for name in names:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
        connection.execute("ALTER TABLE best DROP COLUMN objective")
        connection.execute("UPDATE blocktune_schema SET version_num = '0005'")


def make_schema_4(path: Path) -> None:
    """Takes the checksums away too."""
    make_schema_5(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        for view in ("dispatch", "user_dispatch"):
            connection.execute(f"DROP VIEW {view}")
        for table, names in CHECKSUMS.CHECKSUMS.items():
            for name in names:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
        connection.execute(POWER_LIMIT.DISPATCH_VIEW)
        connection.execute(USER_KERNELS.DISPATCH_VIEW)
        connection.execute("UPDATE blocktune_schema SET version_num = '0004'")
