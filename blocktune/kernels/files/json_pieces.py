"""Large JSON texts, decoded and written piece by piece.

`json.loads` and `json.dumps` keep every other thread of the process waiting until they are done, which takes seconds
for a file that means it. Here the items of the outermost arrays and objects are handled one by one; none is large.
"""

import json
from collections.abc import Iterable, Iterator
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import Any

DEPTH = 2
"""How many levels are taken apart: a document is an object with arrays and objects of small items."""

PIECE_CHARACTERS = (1 << 13, 1 << 16)
"""How much is decoded at once: first so much, and where that does not hold the whole item, so much."""

MAX_PIECES = 200_000

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def unique_members(members: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON from its members.

    Python alone would take the last of two members with one name, where other readers take the first.

    Raises:
        ValueError: two members have one name.
    """
    found: dict[str, Any] = {}
    for name, value in members:
        if name in found:
            raise ValueError(f"an object has two members with the name {name!r:.100}")
        found[name] = value
    return found


_raw_decode = json.JSONDecoder(object_pairs_hook=unique_members).raw_decode


def loads_in_pieces(text: str) -> Any:
    """Return the JSON value of a text.

    Raises:
        ValueError: the text is no JSON, has more pieces than `MAX_PIECES`, one that takes too many characters, or an
            object with two members of one name.
        RecursionError: an item is nested too deeply.
    """
    reader = _Reader(text)
    value = reader.value(DEPTH)
    reader.end()
    return value


def canonical_pieces(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """Yield the text of `canonical_text`, item by item.

    Raises:
        ValueError: a number is not valid JSON.
    """
    if depth and isinstance(value, dict) and value:
        for index, name in enumerate(sorted(value)):
            yield f"{',' if index else '{'}{json.dumps(name)}:"
            yield from canonical_pieces(value[name], depth - 1)
        yield "}"
    elif depth and isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from canonical_pieces(item, depth - 1)
        yield "]"
    else:
        yield canonical_text(value)


def canonical_text(value: Any) -> str:
    """Return the JSON of a value in one line, with sorted keys: equal values, equal text."""
    return _encode(value)


class _Reader:
    """Decodes a text from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._pieces = 0
        self._skip_blanks()

    def value(self, depth: int) -> Any:
        """Return the next value, of which `depth` levels are taken apart. All values are counted."""
        self._pieces += 1
        if self._pieces > MAX_PIECES:
            raise ValueError(f"it has more than {MAX_PIECES} values")
        sign = self._text[self._at : self._at + 1]
        if depth and sign == "{":
            return unique_members(self._members(depth - 1))
        return list(self._items(depth - 1)) if depth and sign == "[" else self._piece()

    def end(self) -> None:
        """Check that nothing follows the value.

        Raises:
            ValueError: the text goes on.
        """
        if self._at < len(self._text):
            raise ValueError(f"the value ends at character {self._at}, but the text goes on")

    def _members(self, depth: int) -> Iterator[tuple[str, Any]]:
        for _ in self._until("}"):
            name = self._piece()
            if not isinstance(name, str):
                raise ValueError(f"a name was expected before character {self._at}")
            self._take(":")
            yield name, self.value(depth)

    def _items(self, depth: int) -> Iterator[Any]:
        for _ in self._until("]"):
            yield self.value(depth)

    def _until(self, closing: str) -> Iterator[None]:
        """Yield before each item of an array or object, and stop after its end."""
        self._at += 1
        self._skip_blanks()
        while self._text[self._at : self._at + 1] != closing:
            yield
            if self._text[self._at : self._at + 1] != closing:
                self._take(",")
                if self._text[self._at : self._at + 1] == closing:
                    raise ValueError(f"an item was expected at character {self._at}")
        self._take(closing)

    def _piece(self) -> Any:
        for characters in PIECE_CHARACTERS:
            window = self._text[self._at : self._at + characters]
            is_last = self._at + len(window) == len(self._text)
            try:
                value, end = _raw_decode(window)
            except ValueError:
                if is_last:
                    raise
                continue
            if end < len(window) or is_last:  # else it may be a number that goes on
                self._at += end
                self._skip_blanks()
                return value
        raise ValueError(
            f"the text at character {self._at} is no value, or is one of more than {characters} characters"
        )

    def _take(self, sign: str) -> None:
        if self._text[self._at : self._at + 1] != sign:
            raise ValueError(f"{sign!r} was expected at character {self._at}")
        self._at += 1
        self._skip_blanks()

    def _skip_blanks(self) -> None:
        self._at = WHITESPACE.match(self._text, self._at).end()
