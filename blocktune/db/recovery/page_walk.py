"""All records that stand in the tables of a damaged SQLite file, found page by page without its schema.

Every page is looked at, whoever refers to it, so neither a damaged schema nor a damaged inner page hides any record.
What cannot be read is counted by how much it may have held. `.recover` of SQLite's shell loses more of the same files
and says of none how much (tools/stores/shell_recovery.py compares them); many shells are built without it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from blocktune.db.recovery.page_file import PageFile
from blocktune.db.recovery.sqlite_pages import (
    FILE_HEADER_BYTES,
    INDEX_INTERIOR,
    INDEX_LEAF,
    INTERIOR,
    TABLE_INTERIOR,
    TABLE_LEAF,
    Cell,
    Page,
    Value,
    page_of,
    record_of,
)

LOCK_BYTE = 1 << 30
"""SQLite keeps nothing on the page of this byte."""

MAX_PAYLOAD_BYTES = 16 << 20
"""No row of a store is larger; a longer one is damage."""


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record of a table: its id and its values, in the order of the columns."""

    rowid: int
    values: tuple[Value, ...]


@dataclass(slots=True)
class FileWalk:
    """The contents of a file.

    records: of live pages; where two have the same id, one that a sound page refers to comes first. freed: of pages
    that the file calls free, which deleted records leave. hidden: how many further records there may have been on
    pages that could not be read. incomplete: why pages are missing altogether, so that this cannot be said; or empty.
    """

    records: list[FoundRecord] = field(default_factory=list)
    freed: list[FoundRecord] = field(default_factory=list)
    hidden: int = 0
    incomplete: str = ""


def walk(file: PageFile, *, smallest_record_bytes: int) -> FileWalk:
    """Return all records of a file.

    Args:
        file: its pages.
        smallest_record_bytes: what a record takes at least, its entry in the page included.
    """
    return _Walker(file, file.usable // smallest_record_bytes).walk()


class _Walker:
    def __init__(self, file: PageFile, most_records: int) -> None:
        self._file = file
        self._most_records = most_records
        self._found = FileWalk(incomplete=file.incomplete)
        self._overflow: set[int] = set()
        self._pages = {number: page for number, page in self._read_pages() if page is not None}
        self._free = self._free_pages()

    def walk(self) -> FileWalk:
        sound = {number: page for number, page in self._pages.items() if page.sound}
        children = {kind: _children(sound.values(), kind) for kind in INTERIOR}
        if any(child > self._file.count for found in children.values() for child in found):
            self._found.incomplete = self._found.incomplete or "the file is shorter than its pages say"
        self._free -= children[TABLE_INTERIOR] | children[INDEX_INTERIOR]
        leaves = [number for number, page in self._pages.items() if page.kind == TABLE_LEAF]
        for number in sorted(leaves, key=lambda number: (number not in children[TABLE_INTERIOR], number)):
            self._read_leaf(number, self._pages[number])
        for number, page in sound.items():
            if page.kind in (INDEX_LEAF, INDEX_INTERIOR):
                content = self._file.page(number)
                for cell in page.cells:
                    self._chain(content, cell)  # so that its overflow pages are known
        indices = children[INDEX_INTERIOR] - children[TABLE_INTERIOR]
        known = self._pages.keys() | self._overflow | self._free | indices | {LOCK_BYTE // self._file.page_bytes + 1}
        unknown = self._file.count - sum(1 <= number <= self._file.count for number in known)
        self._found.hidden += self._most_records * unknown
        return self._found

    def _read_pages(self) -> Iterator[tuple[int, Page | None]]:
        """Yield what each page is, by number; not those that nothing can be read of."""
        for number in self._file.written_pages():
            content, header_at = self._file.page(number), FILE_HEADER_BYTES if number == 1 else 0
            page = page_of(content, self._file.usable, header_at=header_at)
            if page is None or not page.sound:  # perhaps a table's, if only its first byte is damaged
                as_leaf = page_of(content, self._file.usable, header_at=header_at, kind=TABLE_LEAF)
                if as_leaf is not None and as_leaf.sound and as_leaf.cells:
                    page = as_leaf
            if page is not None and (page.sound or page.kind == TABLE_LEAF):
                yield number, page

    def _read_leaf(self, number: int, page: Page) -> None:
        """Take the records of a table's page, which are the deleted ones of a free page."""
        is_free, content = number in self._free, self._file.page(number)
        records = [self._record(content, cell) for cell in page.cells]
        found = [record for record in records if record is not None]
        if is_free:
            self._found.freed += found
            return
        self._found.records += found
        most = len(records) if page.sound else max(len(records), self._most_records)
        self._found.hidden += most - len(found)

    def _record(self, content: bytes, cell: Cell) -> FoundRecord | None:
        payload = self._chain(content, cell)
        values = None if payload is None else record_of(payload)
        return None if values is None else FoundRecord(cell.rowid, values)

    def _chain(self, content: bytes, cell: Cell) -> bytes | None:
        """Return the payload of a cell with what stands in overflow pages, each of which belongs to one cell only."""
        local_end = cell.payload_at + cell.local_bytes
        if not cell.spills:
            return content[cell.payload_at : local_end]
        if cell.payload_bytes > MAX_PAYLOAD_BYTES:
            return None
        parts, left = [content[cell.payload_at : local_end]], cell.payload_bytes - cell.local_bytes
        following = int.from_bytes(content[local_end : local_end + 4], "big")
        while left > 0:
            if not 1 < following <= self._file.count or following in self._overflow or following in self._pages:
                return None
            self._overflow.add(following)
            page = self._file.page(following)
            parts.append(page[4 : min(self._file.usable, 4 + left)])
            left -= len(parts[-1])
            following = int.from_bytes(page[:4], "big")
        return b"".join(parts) if following == 0 else None

    def _free_pages(self) -> set[int]:
        """Return the pages that the file calls free; none where its list of them does not add up."""
        header, found = self._file.header, set[int]()
        trunk = header.first_free
        while trunk:
            content = self._file.page(trunk)
            count = int.from_bytes(content[4:8], "big")
            if trunk in found or count > self._file.usable // 4 - 2:
                return set()
            leaves = [int.from_bytes(content[8 + 4 * index : 12 + 4 * index], "big") for index in range(count)]
            if found.intersection(leaves) or len(set(leaves)) < count:
                return set()
            found |= {trunk, *leaves}
            if not all(1 < number <= self._file.count for number in found):
                return set()
            trunk = int.from_bytes(content[:4], "big")
        return found if len(found) == header.free_pages else set()


def _children(pages: Iterable[Page], kind: int) -> set[int]:
    """Return all pages that inner pages of this kind refer to."""
    return {child for page in pages if page.kind == kind for child in page.children}
