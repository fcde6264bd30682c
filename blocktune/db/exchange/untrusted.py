"""A JSON document that a stranger may have written. Each value is taken out by a rule; a broken one names its place."""

import re
import reprlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.values.errors import ImportRejectedError

T = TypeVar("T")
_SHOWN = 80  # characters of a rejected value that a message repeats
_SHOWN_REASON = 300


@dataclass(frozen=True, slots=True)
class Untrusted:
    """A value and where it stands in the document: its name or index, and what holds it.

    Every method raises `ImportRejectedError` when its rule is broken.
    """

    value: Any
    place: str | int = "document"
    holder: "Untrusted | None" = None

    @property
    def path(self) -> str:
        """The place in the document, such as `bests[3].time_us`. Only a broken rule needs the text."""
        if self.holder is None:
            return str(self.place)
        outer = self.holder.path
        if isinstance(self.place, int):
            return f"{outer}[{self.place}]"
        name = shown(self.place[:_SHOWN])
        return name if outer == "document" else f"{outer}.{name}"

    def reject(self, rule: str) -> NoReturn:
        raise ImportRejectedError(
            f"`{self.path}` must be {rule}, but got {_cut(self.value)}. Nothing was imported; "
            "correct the file or export it again."
        )

    def object(self, required: Collection[str], optional: Collection[str] = ()) -> "dict[str, Untrusted]":
        """Return the fields of an object. Optional ones that are absent or null are left out; others must not exist."""
        if not isinstance(self.value, dict):
            self.reject("an object")
        for name in self.value:
            if name not in required and name not in optional:
                self._field(name).reject(f"absent (known fields: {', '.join([*required, *optional])})")
        for name in required:
            if name not in self.value:
                self.reject(f"an object with the field `{name}`")
        return {
            name: self._field(name)
            for name in [*required, *optional]
            if name in required or self.value.get(name) is not None
        }

    def entries(self, limit: int) -> "dict[str, Untrusted]":
        """Return the entries of an object whose names are data."""
        if not isinstance(self.value, dict) or len(self.value) > limit:
            self.reject(f"an object of up to {limit} entries")
        return {name: self._field(name) for name in self.value}

    def items(self, limit: int) -> "list[Untrusted]":
        return [Untrusted(item, index, self) for index, item in enumerate(self.values(limit))]

    def values(self, limit: int) -> list[Any]:
        """Return what a list holds, for a reader that hands its entries on to a check of their own."""
        if not isinstance(self.value, list) or len(self.value) > limit:
            self.reject(f"a list of up to {limit} entries")
        return self.value

    def text(self, longest: int) -> str:
        """Return a name or version. What a terminal would obey instead of showing has no place in it."""
        if not isinstance(self.value, str) or len(self.value) > longest or not self.value.isprintable():
            self.reject(f"a printable text of up to {longest} characters")
        return self.value

    def prose(self, longest: int) -> str:
        """Return a text of several lines."""
        if not isinstance(self.value, str) or len(self.value) > longest or not _is_prose(self.value):
            self.reject(f"a text of up to {longest} characters")
        return self.value

    def match(self, pattern: str, meaning: str) -> str:
        if not isinstance(self.value, str) or not re.fullmatch(pattern, self.value):
            self.reject(meaning)
        return self.value

    def integer(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self.reject(f"an integer from {low} to {high}")
        return self.value

    def number(self, low: float, high: float) -> float:
        """Return a finite number, low and high included."""
        # NaN is in no range, and an integer of any length can be compared.
        if type(self.value) not in (int, float) or not low <= self.value <= high:
            self.reject(f"a number from {low:g} to {high:g}")
        return float(self.value)

    def numbers(self, limit: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of finite numbers, low and high included."""
        values = self.values(limit)
        if not all(type(value) in (int, float) and low <= value <= high for value in values):
            return tuple(item.number(low, high) for item in self.items(limit))  # names the one that is wrong
        return tuple(map(float, values))

    def moment(self, earliest: datetime, latest: datetime) -> datetime:
        """Return a time with its zone, in ISO 8601."""
        try:
            moment = datetime.fromisoformat(self.value)
        except (TypeError, ValueError):
            self.reject("a time in ISO 8601")
        if moment.tzinfo is None or not earliest <= moment <= latest:
            self.reject(f"a time with its zone from {earliest:%Y-%m-%d} to {latest:%Y-%m-%d}")
        return moment

    def parse_with(self, parse: Callable[[Any], T], meaning: str) -> T:
        """Return what the constructor of another room makes of the value."""
        try:
            return parse(self.value)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            self.reject(f"{meaning} ({shown(str(error), _SHOWN_REASON)})")

    def _field(self, name: str) -> "Untrusted":
        return Untrusted(self.value[name], name, self)


def _cut(value: Any) -> str:
    """Return a value in few characters, without a text of all of it first."""
    if isinstance(value, str):
        text = repr(value[: _SHOWN + 1])
    else:
        text = _BRIEFLY.repr(value) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlist = _BRIEFLY.maxdict = 8
_BRIEFLY.maxstring = _BRIEFLY.maxother = _SHOWN


def _is_prose(text: str) -> bool:
    return all(sign.isprintable() or sign in "\n\t" for sign in text)
