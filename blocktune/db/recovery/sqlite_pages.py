"""Pages, cells and records of SQLite's file format (https://sqlite.org/fileformat2.html), read without SQLite.

Nothing here is believed: what does not add up is no page, no cell or no record, and never an exception. A b-tree page
is `sound` when its cells, free blocks and fragments tile it exactly, as SQLite's own integrity check wants it.
"""

import struct
from dataclasses import dataclass

TABLE_LEAF, TABLE_INTERIOR, INDEX_LEAF, INDEX_INTERIOR = 0x0D, 0x05, 0x0A, 0x02
KINDS = (TABLE_LEAF, TABLE_INTERIOR, INDEX_LEAF, INDEX_INTERIOR)
INTERIOR = (TABLE_INTERIOR, INDEX_INTERIOR)

FILE_HEADER_BYTES = 100
MIN_CELL_BYTES = 4
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Value = int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class Cell:
    """An entry of a page. child: the page below it, of interior pages. A table's interior cell has no payload."""

    offset: int
    end: int
    payload_at: int
    payload_bytes: int
    local_bytes: int
    rowid: int
    child: int

    @property
    def spills(self) -> bool:
        """Whether the payload goes on in overflow pages."""
        return self.payload_bytes > self.local_bytes


@dataclass(frozen=True, slots=True)
class Page:
    """A b-tree page. children: of an interior one, its right-most child last."""

    kind: int
    cells: tuple[Cell, ...]
    children: tuple[int, ...]
    sound: bool


def page_of(content: bytes, usable: int, *, header_at: int = 0, kind: int | None = None) -> Page | None:
    """Return the b-tree page in a page's content; None where the content is not a b-tree page.

    Args:
        content: the whole page.
        usable: the bytes of a page that b-trees use.
        header_at: where the page's header is; on page 1 it follows the file's header.
        kind: what to take it for, whatever its first byte says.
    """
    kind = content[header_at] if kind is None else kind
    pointers_at = header_at + (12 if kind in INTERIOR else 8)
    if kind not in KINDS or len(content) < max(usable, pointers_at):
        return None
    free, count, start, fragments = struct.unpack_from(">HHHB", content, header_at + 1)
    start = start or 65536
    pointers_end = pointers_at + 2 * count
    if pointers_end > start or start > usable:
        return None
    offsets = struct.unpack_from(f">{count}H", content, pointers_at)
    cells = [cell_of(content, offset, kind, usable) for offset in offsets if offset >= pointers_end]
    readable = tuple(cell for cell in cells if cell is not None)
    pieces = [(cell.offset, cell.end) for cell in readable] + _free_blocks(content, free, usable)
    sound = len(readable) == count and _tiles(pieces, start, usable, fragments)
    children = tuple(cell.child for cell in readable)
    if kind in INTERIOR:
        children += struct.unpack_from(">I", content, header_at + 8)
    return Page(kind, readable, children if kind in INTERIOR else (), sound)


def cell_of(content: bytes, offset: int, kind: int, usable: int) -> Cell | None:
    """Return the cell at this place; None where it leaves the page."""
    try:
        at, child, rowid, payload_bytes = offset, 0, 0, 0
        if kind in INTERIOR:
            (child,) = struct.unpack_from(">I", content, at)
            at += 4
        if kind != TABLE_INTERIOR:
            payload_bytes, at = varint(content, at)
        if kind in (TABLE_LEAF, TABLE_INTERIOR):
            rowid, at = varint(content, at)
    except (IndexError, struct.error):
        return None
    local = _local_bytes(payload_bytes, usable, is_table=kind == TABLE_LEAF)
    end = max(at + local + (4 if payload_bytes > local else 0), offset + MIN_CELL_BYTES)
    if payload_bytes < 0 or end > usable:
        return None
    return Cell(offset, end, at, payload_bytes, local, rowid, child)


def _local_bytes(payload: int, usable: int, *, is_table: bool) -> int:
    """Return how much of a payload stands in its cell."""
    most = usable - 35 if is_table else (usable - 12) * 64 // 255 - 23
    if payload <= most:
        return payload
    least = (usable - 12) * 32 // 255 - 23
    kept = least + (payload - least) % (usable - 4)
    return kept if kept <= most else least


def _free_blocks(content: bytes, first: int, usable: int) -> list[tuple[int, int]]:
    """Return where the free blocks of a page begin and end; they stand in rising order."""
    found: list[tuple[int, int]] = []
    at = first
    while at and at + 4 <= usable and (not found or at >= found[-1][1]):
        following, size = struct.unpack_from(">HH", content, at)
        found.append((at, at + size))
        at = following
    return found


def _tiles(pieces: list[tuple[int, int]], start: int, usable: int, fragments: int) -> bool:
    """Return whether the pieces lie side by side from start to the end, with `fragments` bytes of gaps in all."""
    at, gaps = start, 0
    for begin, end in sorted(pieces):
        if begin < at:
            return False
        gaps, at = gaps + begin - at, end
    return at <= usable and gaps + usable - at == fragments


def varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the signed integer that begins here, and where it ends.

    Raises:
        IndexError: the content ends before.
    """
    value = 0
    for index in range(8):
        byte = content[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    value = value << 8 | content[at + 8]
    return (value - (1 << 64) if value >> 63 else value), at + 9


def record_of(payload: bytes) -> tuple[Value, ...] | None:
    """Return the values of a record; None where its lengths do not add up. What of a text is no UTF-8 is escaped."""
    try:
        types_end, at = varint(payload, 0)
        types = []
        while at < types_end:
            serial, at = varint(payload, at)
            types.append(serial)
    except IndexError:
        return None
    if at != types_end or any(serial < 0 or serial in (10, 11) for serial in types):
        return None
    values: list[Value] = []
    for serial in types:
        size = _INTEGER_BYTES.get(serial, 8 if serial == 7 else max(0, serial - 12) // 2)
        if at + size > len(payload):
            return None
        values.append(_value(serial, payload[at : at + size]))
        at += size
    return tuple(values) if at == len(payload) else None


def _value(serial: int, raw: bytes) -> Value:
    if serial == 0:
        return None
    if serial == 7:
        return float(struct.unpack(">d", raw)[0])
    if serial in (8, 9):
        return serial - 8
    if serial < 12:
        return int.from_bytes(raw, "big", signed=True)
    return raw.decode("utf-8", errors="surrogateescape") if serial % 2 else raw
