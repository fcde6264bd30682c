"""The pages of a SQLite file as its last commit left them: those in the write-ahead log go before those in the file."""

import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from blocktune.db.recovery.sqlite_pages import FILE_HEADER_BYTES, page_of
from blocktune.kernels.files.reading import LOG_BYTES, open_file, read_bytes

PAGE_BYTES = tuple(1 << power for power in range(9, 17))
DEFAULT_PAGE_BYTES = 4096
MAX_RESERVED_BYTES = 32
SAMPLED_PAGES = 512
"""How many pages are looked at to find out their size."""

_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_WAL_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
"""By the byte order of the checksums."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header on page 1. pages is 0 where it is not given."""

    page_bytes: int
    reserved: int
    pages: int
    first_free: int
    free_pages: int

    @classmethod
    def of(cls, content: bytes) -> Self:
        content = content[:FILE_HEADER_BYTES].ljust(FILE_HEADER_BYTES, b"\0")
        page_bytes = int.from_bytes(content[16:18], "big")
        pages, first_free, free_pages = struct.unpack_from(">III", content, 28)
        told = content[24:28] == content[92:96]  # else an old SQLite wrote last, which does not keep the count
        return cls(
            1 << 16 if page_bytes == 1 else page_bytes, content[20], pages if told else 0, first_free, free_pages
        )


class PageFile:
    """The pages of a file, counted from 1.

    count: how many there are. incomplete: why some that were there are missing, or empty.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path)
        self._wal_path = Path(f"{path}-wal")
        self._file_bytes = os.fstat(self._file.fileno()).st_size
        self._in_log: dict[int, int] = {}  # where the newest content of a page begins in the log
        self._log: bytes = b""
        self.incomplete = ""
        written = FileHeader.of(os.pread(self._file.fileno(), FILE_HEADER_BYTES, 0))
        self.page_bytes, reserved = self._sizes(written)
        self.usable = self.page_bytes - reserved
        self.count, odd = divmod(self._file_bytes, self.page_bytes)
        if odd:
            self.incomplete = "the file ends within a page"
        self._read_log()
        self.header = FileHeader.of(self.page(1))
        if self.header.pages > self.count:
            self.incomplete = "the file is shorter than it says"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def page(self, number: int) -> bytes:
        """Return the content of a page; zeros where there is none."""
        if number in self._in_log:
            at = self._in_log[number]
            return self._log[at : at + self.page_bytes]
        content = os.pread(self._file.fileno(), self.page_bytes, (number - 1) * self.page_bytes)
        return content.ljust(self.page_bytes, b"\0")

    def written_pages(self) -> list[int]:
        """Return the numbers of the pages that were ever written, in order: a file of holes may have any length."""
        found, at = set(self._in_log), 0
        while at < self._file_bytes:
            try:
                begin = os.lseek(self._file.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole follows
                break
            end = os.lseek(self._file.fileno(), begin, os.SEEK_HOLE)
            last = -(-end // self.page_bytes)
            found.update(range(begin // self.page_bytes + 1, last + 1))
            at = last * self.page_bytes
        return sorted(number for number in found if number <= self.count)

    def _sizes(self, header: FileHeader) -> tuple[int, int]:
        """Return the size of a page, and how much of it b-trees leave free: what makes the most pages sound."""
        told = [(header.page_bytes, header.reserved), (header.page_bytes, 0)]
        plausible = [pair for pair in told if pair[0] in PAGE_BYTES and pair[1] <= MAX_RESERVED_BYTES]
        others = [(size, 0) for size in (DEFAULT_PAGE_BYTES, *PAGE_BYTES)]
        found = Counter({pair: self._sound_pages(*pair) for pair in dict.fromkeys([*plausible, *others])})
        return max(found, key=found.__getitem__)  # the first one of equals

    def _sound_pages(self, page_bytes: int, reserved: int) -> int:
        """Return the bytes in sound b-tree pages of a sample of the file, if pages have this size."""
        starts = range(0, self._file_bytes - page_bytes + 1, page_bytes)
        step = max(1, len(starts) * page_bytes // (SAMPLED_PAGES * DEFAULT_PAGE_BYTES))
        sound = 0
        for start in starts[::step]:
            content = os.pread(self._file.fileno(), page_bytes, start)
            header_at = 0 if start else FILE_HEADER_BYTES
            page = page_of(content, page_bytes - reserved, header_at=header_at) if len(content) == page_bytes else None
            sound += page_bytes * step if page is not None and page.sound and page.cells else 0
        return sound

    def _read_log(self) -> None:
        """Find the newest committed content of every page in the write-ahead log."""
        self._log = read_bytes(self._wal_path, LOG_BYTES) if self._wal_path.is_file() else b""
        if not self._log:
            return
        header = self._log[:_WAL_HEADER_BYTES].ljust(_WAL_HEADER_BYTES, b"\0")
        magic, _, page_bytes = struct.unpack_from(">III", header)
        order = _WAL_MAGIC.get(magic, ">")
        sums = _checksum(header[:24], order, (0, 0))
        if magic not in _WAL_MAGIC or page_bytes != self.page_bytes or struct.pack(">II", *sums) != header[24:32]:
            self.incomplete = "the write-ahead log is damaged"
            return
        salts, pending, intact = header[16:24], dict[int, int](), True
        for at in self._frames():
            frame = self._log[at : at + _FRAME_HEADER_BYTES]
            if frame[8:16] != salts:
                intact = False  # left over from before the log began again, unless more of ours follow
                continue
            content_at = at + _FRAME_HEADER_BYTES
            content = self._log[content_at : content_at + self.page_bytes]
            sums = _checksum(content, order, _checksum(frame[:8], order, sums))
            if not intact or struct.pack(">II", *sums) != frame[16:24]:
                self.incomplete = "the write-ahead log is damaged"
                return
            number, pages_after = struct.unpack_from(">II", frame)
            pending[number] = content_at
            if pages_after:  # a commit
                self._in_log |= pending
                self.count, pending = pages_after, {}

    def _frames(self) -> Iterator[int]:
        frame_bytes = _FRAME_HEADER_BYTES + self.page_bytes
        return iter(range(_WAL_HEADER_BYTES, len(self._log) - frame_bytes + 1, frame_bytes))


def _checksum(content: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's running checksum of the log."""
    first, second = sums
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second
