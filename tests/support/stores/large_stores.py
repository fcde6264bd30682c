"""Stores of thousands of winners, made by SQL: one by one they would take minutes."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import AttentionShape


def multiplied(path: Path, count: int, *, device: DeviceSpec | None = None) -> Path:
    """Gives a store with one winner `count` of them, for key lengths from 10,002 on; device: another one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        if device is not None:
            told = (device.key, device.name, device.limits.name, device.num_sms, device.source)
            repeated = "key = ?, name = ?, compute_capability = ?, num_sms = ?, source = ?"
            text = json.dumps(device.to_json(), sort_keys=True, separators=(",", ":"))
            connection.execute(f"UPDATE device SET {repeated}, document = ?, checksum = NULL", (*told, text))
        (document,) = connection.execute("SELECT document FROM shape").fetchone()
        connection.execute("UPDATE best SET checksum = NULL, served_checksum = NULL")
        shape, best = (_columns(connection, table) for table in ("shape", "best"))
        for number in range(2, count + 1):
            longer = AttentionShape.from_json(json.loads(document) | {"seqlen_k": 10_000 + number})
            text = json.dumps(longer.to_json(), sort_keys=True, separators=(",", ":"))
            _copy(connection, "shape", shape, {"id": number, "document": text, "seqlen_k": 10_000 + number})
            _copy(connection, "best", best, {"id": number, "shape_id": number})
        connection.execute("COMMIT")
    return path


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _copy(connection: sqlite3.Connection, table: str, columns: list[str], changes: dict[str, object]) -> None:
    """Adds the first row again, with these values."""
    values = ", ".join(f":{column}" if column in changes else column for column in columns)
    connection.execute(f"INSERT INTO {table} SELECT {values} FROM {table} WHERE id = 1", changes)


def multiplied_trials(path: Path, shapes: int) -> int:
    """Gives a store with the trials of one shape those of `shapes`, and returns how many there are then.

    The copies have no checksum, which is how rows of an older blocktune are.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        (document,) = connection.execute("SELECT document FROM shape").fetchone()
        columns = _columns(connection, "shape")
        for number in range(2, shapes + 1):
            length = 10_000 + number
            longer = AttentionShape.from_json(json.loads(document) | {"seqlen_k": length})
            text = json.dumps(longer.to_json(), sort_keys=True, separators=(",", ":"))
            _copy(connection, "shape", columns, {"id": number, "document": text, "seqlen_k": length})
        names = [name for name in _columns(connection, "trial") if name not in ("id", "shape_id", "checksum")]
        kept, own = ", ".join(names), ", ".join(f"trial.{name}" for name in names)
        connection.execute(
            f"INSERT INTO trial (shape_id, {kept}) SELECT shape.id, {own} "
            "FROM shape JOIN trial WHERE shape.id > 1 AND trial.shape_id = 1"
        )
        connection.execute("COMMIT")
        (count,) = connection.execute("SELECT count(*) FROM trial").fetchone()
    return int(count)
