"""The one door for files that are read: regular files alone, opened without waiting, of a bounded size.

A pipe may have no writer, a device or a file of the operating system no end, and a file that means it no size that the
memory holds. What is refused is an `OSError` whose `strerror` says why, as that of a missing file does.
"""

import errno
import gzip
import json
import os
import stat
from importlib import resources
from importlib.resources.abc import Traversable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from blocktune.kernels.files.json_pieces import unique_members
from blocktune.kernels.files.ownership import require_trusted

KEY_BYTES = 16 << 10
SYSTEM_BYTES = 64 << 10
"""Of a file that the operating system makes up."""
SOURCE_BYTES = 1 << 20
"""Of a file of the package."""
SHAPES_BYTES = 4 << 20
COUNTER_BYTES = 64 << 20
DOCUMENT_BYTES = 64 << 20
"""Of JSON that commands read: results, benches, ladders, and what else they write."""
LOG_BYTES = 1 << 30
"""Of the write-ahead log of a damaged store."""
STORE_BYTES = 4 << 30
"""Of a store that is copied in memory."""
COMPILED_BYTES = 256 << 20
"""Of what compilers leave in a cache."""
SERVED_BYTES = 16 << 20
"""Of JSON that production reads."""

MAX_DEPTH = 100
"""Levels of JSON; no document of ours has more than ten."""

_DATABASE = b"SQLite format 3\0"

_KINDS = (
    (stat.S_ISDIR, "it is a directory"),
    (stat.S_ISFIFO, "it is a pipe; write what comes out of it to a file first"),
    (stat.S_ISSOCK, "it is a socket"),
)


def open_file(path: Path, flags: int = 0) -> BinaryIO:
    """Return a regular file, opened for reading, which never waits.

    Args:
        path: the file.
        flags: of `os.open` besides those of reading, such as `os.O_NOFOLLOW`.

    Raises:
        OSError: it is missing, no regular file, or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # what a socket answers
            raise _refused(path, errno.EINVAL, "it is a socket") from error
        raise
    except ValueError as error:  # a zero in the name
        raise _refused(path, errno.EINVAL, str(error)) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise _refused(path, errno.EINVAL, next((said for is_so, said in _KINDS if is_so(mode)), "it is a device"))


_PART_BYTES = 1 << 16
"""What is read at once, at least."""


def read_bytes(path: Path, max_bytes: int, flags: int = 0) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be opened, or is larger than this.
    """
    content = bytearray()
    with open_file(path, flags) as file:
        size = os.fstat(file.fileno()).st_size  # 0 of files of the kernel, whatever they hold
        while len(content) <= max_bytes:
            # takes memory for what is there; `read` returns nothing where the operating system would wait
            part = file.read(min(max(size + 1 - len(content), _PART_BYTES), max_bytes + 1 - len(content)))
            if not part:
                return bytes(content)
            content += part
    raise _too_large(path, max_bytes)


def read_trusted(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file that no other user can change.

    Raises:
        StoreError: another user can.
        OSError: it cannot be opened, or is too large.
    """
    content = read_bytes(path, max_bytes)
    require_trusted(path)
    return content


def read_text(path: Path, max_bytes: int) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        OSError: it cannot be opened, or is too large.
        UnicodeDecodeError: it is no text.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


def read_json(path: Path, max_bytes: int = DOCUMENT_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: it cannot be opened, or is too large.
        ValueError: it is no JSON, is nested too deeply, or has an object with two members of one name.
    """
    return json_value(read_bytes(path, max_bytes))


def is_database(path: Path) -> bool:
    """Return whether a file begins as one of SQLite does.

    Raises:
        OSError: it cannot be opened.
    """
    with open_file(path) as file:
        return file.read(len(_DATABASE)) == _DATABASE


def read_gzip(path: Path, max_bytes: int) -> bytes:
    """Return the unpacked content of a gzip file.

    Raises:
        OSError: it cannot be opened, is no gzip (`BadGzipFile`), or unpacks to more than this.
        EOFError, zlib.error: it is damaged.
    """
    with gzip.open(BytesIO(read_bytes(path, max_bytes))) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_large(path, max_bytes)
    return content


def read_resource(entry: Traversable) -> str:
    """Return the text of a file that is part of the package."""
    return entry.read_text(encoding="utf-8")


def package_text(package: str, *names: str) -> str:
    """Return the text of a file of a package by its name below it."""
    return read_resource(resources.files(package).joinpath(*names))


def json_value(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or has an object with two members of one name.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=unique_members)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for held in level for item in _items(held) if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_large(path: Path, max_bytes: int) -> OSError:
    size = f"{max_bytes >> 20} MiB" if max_bytes >> 20 else f"{max_bytes >> 10} KiB"
    return _refused(path, errno.EFBIG, f"it is larger than {size}")


def _refused(path: Path, number: int, reason: str) -> OSError:
    return OSError(number, reason, str(path))
