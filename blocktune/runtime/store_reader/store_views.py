"""Queries of production to a store: the views that the database room keeps for it, and how their rows are fetched.

A view is SQL that whoever wrote the file chose, and SQL can make a value of any size or never end. So a view has to be
one that a migration of blocktune makes, over tables, and every value is bounded before it leaves SQLite.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from blocktune.kernels.files.checksums import CHECKSUM, require_unchanged
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.errors import ForeignStoreError, UsageError

MAX_TEXT = 1000
"""Characters of a text. Longer ones than the tables declare are no row of ours."""

ROWS_AT_ONCE = 128
"""Rows that one step of SQLite hands over: between two steps Python may let another thread run, for 5 ms and more."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ViewForm:
    """How a schema makes a view. `_json` at the end of a column's name is left out of what is fetched."""

    tables: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreView:
    """A view of the store. forms: by the digest of its definition."""

    name: str
    forms: Mapping[str, ViewForm]


_TABLES = ("best", "config", "device", "environment", "kernel", "shape")
_USER_TABLES = ("device", "environment", "user_best")
_DISPATCH = ("device_key", "shape_json", "config_json", "kernel_hash", "origin", "time_us", "triton", "ptxas", "driver")
_USER_DISPATCH = ("device_key", "kernel", "source_hash", "problem", "config", "time_us", "triton", "ptxas", "driver")

DISPATCH = StoreView(
    "dispatch",
    {
        "b8f49ea04f32dbb7": ViewForm(_TABLES, _DISPATCH),
        "1ad91cb0b92e1b01": ViewForm(_TABLES, (*_DISPATCH, "power_limit_w")),
        "6163a9c4a63a28cf": ViewForm(_TABLES, (*_DISPATCH, "power_limit_w", CHECKSUM)),
        "2ba3d156fea0de6d": ViewForm(_TABLES, (*_DISPATCH, "power_limit_w", CHECKSUM)),
    },
)
"""The winners of our kernels."""

USER_DISPATCH = StoreView(
    "user_dispatch",
    {
        "e0db212a15365541": ViewForm(_USER_TABLES, _USER_DISPATCH),
        "097440330c66e04a": ViewForm(_USER_TABLES, (*_USER_DISPATCH, CHECKSUM)),
        "8975eae572987cfc": ViewForm(_TABLES, (*_USER_DISPATCH, CHECKSUM)),
    },
)
"""The winners of autotuned kernels."""


def digest_of(definition: str) -> str:
    """Return what identifies a view's SQL, whatever blanks are in it."""
    return hashlib.sha256(" ".join(definition.split()).encode()).hexdigest()[:16]


def columns_of(connection: sqlite3.Connection, view: StoreView, where: str) -> tuple[str, ...]:
    """Return the columns of a view in this store.

    Raises:
        ForeignStoreError: the view, or what it reads, is not what blocktune makes.
    """
    query = "SELECT sql FROM sqlite_master WHERE type = 'view' AND name = ?"
    definitions = [str(row[0]) for row in connection.execute(query, (view.name,))]
    form = view.forms.get(digest_of(definitions[0])) if len(definitions) == 1 else None
    if form is None or not _are_tables(connection, form.tables):
        raise ForeignStoreError(
            f"The view `{view.name}` of {where} is not the one that blocktune makes. Give another store by "
            "BLOCKTUNE_DB, or look at this one with `tune doctor`."
        )
    return form.columns


def _are_tables(connection: sqlite3.Connection, names: tuple[str, ...]) -> bool:
    marks = ", ".join("?" * len(names))
    query = f"SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ({marks})"
    return bool(connection.execute(query, names).fetchone() == (len(names),))


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of a view to select: those of devices of this one's compute capability, with these values."""

    view: StoreView
    device: DeviceSpec
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def condition(self) -> str:
        """SQL for it, with named parameters."""
        return " AND ".join(["device_key LIKE :alike", *(f"{column} = :{column}" for column in self.values)])

    @property
    def parameters(self) -> dict[str, str]:
        return {"alike": f"%|{self.device.limits.name}|%", **self.values}

    def fetch_rows(self, connection: sqlite3.Connection, columns: tuple[str, ...], most: int) -> Iterator[Row]:
        """Yield at most `most` rows, those of this very device first. Equal rows come in equal order."""
        names = [column.removesuffix("_json") for column in columns]
        bounded = ", ".join(f"{_bounded_column(column)} AS {name}" for column, name in zip(columns, names, strict=True))
        values = ", ".join(names)
        query = f"""
            SELECT json_group_array(json_array({values})) FROM (
                SELECT {values}, row_number() OVER (ORDER BY device_key <> :key, {values}) - 1 AS place
                FROM (SELECT {bounded} FROM {self.view.name} WHERE {self.condition})
                ORDER BY place LIMIT :most
            ) GROUP BY place / {ROWS_AT_ONCE}
        """
        for (rows,) in connection.execute(query, self.parameters | {"key": self.device.key, "most": most}):
            for row in json.loads(rows):
                yield dict(zip(names, row, strict=True)) | {"time_us": _number(row[names.index("time_us")])}

    def count(self, connection: sqlite3.Connection) -> int:
        """Return how many rows there are."""
        query = f"SELECT count(*) FROM {self.view.name} WHERE {self.condition}"
        return int(connection.execute(query, self.parameters).fetchone()[0])


def unchanged_rows(rows: Iterable[Row]) -> tuple[list[Row], list[str]]:
    """Return the rows that are as they were written, without their checksums, and what is wrong with each other one."""
    kept, changed = list[Row](), list[str]()
    for row in rows:
        checksum = row.pop(CHECKSUM, None)
        try:
            require_unchanged(row, checksum)
            kept.append(row)
        except (UsageError, ValueError) as error:
            named = ", ".join(f"{row[name]!s:.200}" for name in ("device_key", "shape", "problem") if name in row)
            changed.append(f"{named}: {error}")
    return kept, changed


def _bounded_column(column: str) -> str:
    """Return SQL for a column's value, or NULL for one that we never write: bytes, which JSON lacks, or a long text."""
    bounded = f"CASE WHEN typeof({column}) = 'blob' OR length({column}) > {MAX_TEXT} THEN NULL ELSE {column} END"
    if column != "time_us":
        return bounded
    # JSON of SQLite has 15 digits, which is not all of a number
    return f"CASE typeof({column}) WHEN 'real' THEN printf('%!.17g', {column}) WHEN 'null' THEN NULL ELSE '?' END"


def _number(text: str | None) -> float | str | None:
    """Return the number of a text; the text itself, which is no time, where it is not a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
