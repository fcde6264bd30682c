"""What a measured value may be. A record declares it once, where its field stands:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Telemetry:
        power_w: Annotated[float | None, Real(0, 100_000, decimals=1)] = None

The store's columns and bounds, its documents and their import, and sweep files follow from `columns_of(Telemetry)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Real:
    """A number from low to high.

    decimals: digits after the point that a sweep file keeps; None keeps all.
    """

    low: float
    high: float
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer from low to high."""

    low: int = 0
    high: int = LARGEST_COUNT


@dataclass(frozen=True, slots=True)
class Word:
    """A printable text of up to `longest` characters; one that a stranger sends has to match `pattern`, too.

    meaning: what the pattern says, as part of an error.
    """

    longest: int
    pattern: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Prose:
    """A text of several lines, such as a compiler's, with up to `longest` characters."""

    longest: int


@dataclass(frozen=True, slots=True)
class Several:
    """Up to `most` values of one kind."""

    of: Real | Word
    most: int


Kind = Real | Whole | Word | Prose | Several


@dataclass(frozen=True, slots=True)
class Derived:
    """Marks a value that follows from others by a model, which may have changed since: sweep files leave it out."""


@dataclass(frozen=True, slots=True)
class Later:
    """Marks a value that came after the checksums: its column is the table's last, older rows and documents lack it.
    A document leaves it out where it is at its default, so that older versions read what has none."""


@dataclass(frozen=True, slots=True)
class Column:
    """Describe one measured value of a record.

    optional: it may be None, where it was not measured. default: of a later value, which a row without it has.
    """

    name: str
    kind: Kind
    optional: bool
    derived: bool
    later: bool = False
    default: Any = None

    @property
    def decimals(self) -> int | None:
        """The digits after the point that a sweep file keeps; None keeps all."""
        kind = self.kind.of if isinstance(self.kind, Several) else self.kind
        return kind.decimals if isinstance(kind, Real) else None


_COLUMNS: dict[type[Any], tuple[Column, ...]] = {}


def columns_of(record_type: type[Any]) -> tuple[Column, ...]:
    """Return a record's measured values in the order of its fields, which the table's columns have, too."""
    if record_type not in _COLUMNS:  # thousands of rows share a few types
        _COLUMNS[record_type] = tuple(_columns(record_type))
    return _COLUMNS[record_type]


def _columns(record_type: type[Any]) -> Iterator[Column]:
    for field in fields(record_type):
        if get_origin(field.type) is not Annotated:
            continue
        kept, *marks = get_args(field.type)
        yield Column(
            name=field.name,
            kind=next(mark for mark in marks if isinstance(mark, Kind)),
            optional=NoneType in get_args(kept),
            derived=Derived() in marks,
            later=Later() in marks,
            default=field.default if Later() in marks else None,
        )


def plain_values(record: Any) -> dict[str, Any]:
    """Return the measured values of a record by name, as JSON and a table's columns take them."""
    values = {column.name: getattr(record, column.name) for column in columns_of(type(record))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def document_values(record: Any) -> dict[str, Any]:
    """Return what `plain_values` gives, without later values that are at their default."""
    later = (column for column in columns_of(type(record)) if column.later)
    at_default = {column.name for column in later if getattr(record, column.name) == column.default}
    return {name: value for name, value in plain_values(record).items() if name not in at_default}


def record_values(record_type: type[Any], row: Any) -> dict[str, Any]:
    """Return what `plain_values` gave of a record, as the record's fields take it, from a row's attributes."""
    values = {column.name: getattr(row, column.name) for column in columns_of(record_type)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
