"""Single bits are corrected. Checksums tell that a row, or one that it refers to, has changed; where one bit has, there
is one change of a bit by which all of them agree again, and it is found by trying every one.

Two changes of one row are left alone. That another content agrees by chance takes 10^15 rows.
"""

import math
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects.sqlite import dialect

from blocktune.db.records.linked_rows import LinkedRow, links_of
from blocktune.db.records.row_checksums import served_checksum
from blocktune.db.records.row_values import UNREADABLE, repeated_config, repeated_shape, whole_device, whole_environment
from blocktune.db.records.rows import best_of, trial_of, view_documents
from blocktune.db.tables.models import Base
from blocktune.kernels.values.shape import AttentionShape

LONGEST_TEXT = 4000
"""Characters of a text whose bits are tried."""

MOST_FAILURES = 10
"""Trials and winners that no bit corrects, after which no more are tried: each takes a second."""

_TABLES = Base.metadata.tables
_DIALECT = dialect()

_SELF_CHECKED: Mapping[str, Callable[[Any], object]] = {"device": whole_device, "environment": whole_environment}
"""Rows with a checksum or digest of their own."""

_RESULTS: Mapping[str, Callable[[Any], Any]] = {"trial": trial_of, "best": best_of}

_TOLD = {"shape": ("document",), "config": ("document",), "kernel": ("name", "source_hash")}
"""The columns that results are made of, in rows that have no checksum."""

Raw = dict[str, Any]
"""The columns of a row as SQLite keeps them: texts are bytes."""


@dataclass(frozen=True, slots=True)
class BitCorrection:
    """Where a bit was corrected."""

    table: str
    row_id: int
    column: str

    def __str__(self) -> str:
        return f"{self.table}.{self.column} of row {self.row_id}"


def correct(connection: sqlite3.Connection) -> list[BitCorrection]:
    """Correct single bits of a store's rows, in the connection's transaction. Returns what was corrected."""
    texts = connection.text_factory
    connection.text_factory = bytes
    try:
        work = _Work(connection)
        work.correct_self_checked()
        work.correct_results()
        work.correct_repeated_columns()
    finally:
        connection.text_factory = texts
    return work.corrections


@dataclass
class _Work:
    """Corrects one store.

    shared: the rows that results refer to, by table and id. made: the same as SQLAlchemy would have them.
    vouched: those of them that a sound result refers to.
    kernel_names: what sound results of attention say of their kernel rows.
    """

    connection: sqlite3.Connection
    corrections: list[BitCorrection] = field(default_factory=list)
    shared: dict[tuple[str, int], Raw] = field(default_factory=dict)
    made: dict[tuple[str, int], SimpleNamespace] = field(default_factory=dict)
    vouched: set[tuple[str, int]] = field(default_factory=set)
    kernel_names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*_SELF_CHECKED, *_TOLD):
            for row in self._rows(name):
                self.shared[name, row["id"]] = row

    def correct_self_checked(self) -> None:
        for (table, row_id), row in self.shared.items():
            check = _SELF_CHECKED.get(table)
            if check is not None and not _holds(check, table, row):
                for column, value in _changes(row, row.keys() - {"id"}):
                    if _holds(check, table, row | {column: value}):
                        self._write(table, row_id, column, value)
                        break

    def correct_results(self) -> None:
        broken = [
            (table, row["id"]) for table in _RESULTS for row in self._rows(table) if not self._is_sound(table, row)
        ]
        failures = 0
        for table, row_id in broken:
            (row,) = self._rows(table, row_id)
            if failures < MOST_FAILURES and not self._is_sound(table, row):
                failures += not self._is_corrected(table, row)

    def correct_repeated_columns(self) -> None:
        """Write what queries ask of sound rows again, where it contradicts them."""
        for table, row_id in sorted(self.vouched):
            row = self.shared[table, row_id]
            if table == "kernel":
                name = self.kernel_names.get(row_id)
                wanted: Mapping[str, Any] = {} if name is None else {"name": name}
            elif table in _TOLD:
                told: Any = SimpleNamespace(document=row["document"].decode(), direction=row.get("direction"))
                wanted = (repeated_shape if table == "shape" else repeated_config)(told)
            else:
                continue
            for column, value in wanted.items():
                kept = value.encode() if isinstance(value, str) else value
                if row[column] != kept:
                    self._write(table, row_id, column, kept)

    def _is_corrected(self, table: str, row: Raw) -> bool:
        """Try the bits of what only broken results refer to, then those of the row. Returns whether one was found."""
        for name, target in self._targets(table, row).items():
            place = target, row[f"{name}_id"]
            if target not in _TOLD or place in self.vouched or place not in self.shared:
                continue
            held = self.shared[place]
            for column, value in _changes(held, _TOLD[target]):
                self._put(place, held | {column: value})
                if self._is_sound(table, row):
                    self._write(*place, column, value)
                    return True
            self._put(place, held)
        for column, value in _changes(row, row.keys() - {"id"}):
            if self._is_sound(table, row | {column: value}):
                self._write(table, row["id"], column, value)
                return True
        return False

    def _is_sound(self, table: str, row: Raw) -> bool:
        """Return whether a result agrees with its checksum, and remember whom it vouches for."""
        targets = self._targets(table, row)
        places = {name: (target, row[f"{name}_id"]) for name, target in targets.items()}
        try:
            linked = {name: self._linked_row(place) for name, place in places.items()}
            found = LinkedRow(__table__=_TABLES[table], **vars(_convert_row(table, row)), **linked)
            record = _RESULTS[table](found)
        except UNREADABLE:
            return False
        if found.checksum is None:
            return True  # it can vouch for nothing
        self.vouched.update(place for place in places.values() if place in self.shared)
        if isinstance(record.shape, AttentionShape):
            self.kernel_names[row["kernel_id"]] = record.config.kernel
        if table == "best":
            served = served_checksum(record, view_documents(found))
            if found.served_checksum != served:
                self._write(table, row["id"], "served_checksum", served.encode())
        return True

    @staticmethod
    def _targets(table: str, row: Raw) -> dict[str, str]:
        """Return the tables that a result refers to, by the name of the link."""
        links = links_of(_TABLES[table]).items()
        return {name: target.name for name, target in links}

    def _rows(self, table: str, row_id: int | None = None) -> Iterator[Raw]:
        names = _TABLES[table].c.keys()
        condition, key = ("", ()) if row_id is None else (" WHERE id = ?", (row_id,))
        for values in self.connection.execute(f"SELECT {', '.join(names)} FROM {table}{condition}", key).fetchall():
            yield dict(zip(names, values, strict=True))

    def _linked_row(self, place: tuple[str, int]) -> SimpleNamespace | None:
        """Return a row that results refer to, None where there is none. Raises the errors of `_convert_row`."""
        if place not in self.made and place in self.shared:
            self.made[place] = _convert_row(place[0], self.shared[place])
        return self.made.get(place)

    def _put(self, place: tuple[str, int], row: Raw) -> None:
        """Remember what a row that results refer to holds now."""
        self.shared[place] = row
        self.made.pop(place, None)

    def _write(self, table: str, row_id: int, column: str, value: Any) -> None:
        mark = "CAST(? AS TEXT)" if isinstance(value, bytes) else "?"
        self.connection.execute(f"UPDATE {table} SET {column} = {mark} WHERE id = ?", (value, row_id))
        if (table, row_id) in self.shared:
            self._put((table, row_id), self.shared[table, row_id] | {column: value})
        self.corrections.append(BitCorrection(table, row_id, column))


def _holds(check: Callable[[Any], object], table: str, row: Raw) -> bool:
    try:
        check(_convert_row(table, row))
    except UNREADABLE:
        return False
    return True


def _convert_row(table: str, row: Raw) -> SimpleNamespace:
    """Return the row as SQLAlchemy would have it.

    Raises:
        one of UNREADABLE: a text or a date is none.
    """
    converters = _converters(_TABLES[table])
    values = {}
    told = _TOLD.get(table, row.keys())
    for name, value in row.items():
        # a text that no record is made of is written again, whatever has become of it
        plain = value.decode(errors="strict" if name in told else "replace") if isinstance(value, bytes) else value
        convert = converters[name]
        values[name] = plain if convert is None else convert(plain)
    return SimpleNamespace(**values)


@cache
def _converters(table: Table) -> dict[str, Callable[[Any], Any] | None]:
    return {
        column.name: column.type.dialect_impl(_DIALECT).result_processor(_DIALECT, None) for column in table.columns
    }


def _changes(row: Raw, names: Any) -> Iterator[tuple[str, Any]]:
    """Yield every change of one bit of some columns, by the column's name."""
    for name in sorted(names):
        for value in _one_bit_off(row[name]):
            yield name, value


def _one_bit_off(value: Any) -> Iterator[Any]:
    if isinstance(value, bytes) and len(value) <= LONGEST_TEXT:
        for place in range(len(value)):
            for bit in range(8):
                yield value[:place] + bytes([value[place] ^ 1 << bit]) + value[place + 1 :]
    elif isinstance(value, int):
        yield from (value ^ 1 << bit for bit in range(63))
    elif isinstance(value, float):
        (bits,) = struct.unpack("<q", struct.pack("<d", value))
        changed = (struct.unpack("<d", struct.pack("<Q", bits & (2**64 - 1) ^ 1 << bit))[0] for bit in range(64))
        yield from filter(math.isfinite, changed)
