"""The one door for files: what is no regular file of a bounded size is refused in words, at once."""

import gzip
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from blocktune.kernels.files import ownership
from blocktune.kernels.files.reading import (
    MAX_DEPTH,
    json_value,
    open_file,
    package_text,
    read_bytes,
    read_gzip,
    read_json,
    read_text,
    read_trusted,
)
from blocktune.kernels.hardware.catalogue import CATALOGUE_FILE
from blocktune.kernels.values.errors import StoreError
from tests.support.stores.odd_values import odd_file

pytestmark = pytest.mark.triton_free

REASONS = {
    "missing": "No such file or directory",
    "directory": "it is a directory",
    "pipe": "it is a pipe; write what comes out of it to a file first",
    "socket": "it is a socket",
    "endless": "it is a device",
    "sparse": "it is larger than 64 MiB",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_is_no_file_of_this_size_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        read_bytes(odd_file(tmp_path, kind), 64 << 20)
    assert caught.value.strerror == REASONS[kind]
    assert caught.value.filename == str(tmp_path / kind)


def test_a_file_of_the_operating_system_ends_the_reading() -> None:
    """It has no size, and its reading would wait: what is not there at once is not read."""
    content = b""
    with suppress(PermissionError):
        content = read_bytes(Path("/proc/kmsg"), 64 << 20)
    assert isinstance(content, bytes)


def test_a_file_as_large_as_it_may_be_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2048)
    assert read_text(path, 2048) == "x" * 2048
    with pytest.raises(OSError, match="it is larger than 1 KiB"):
        read_bytes(path, 1024)


def test_no_file_stays_open_that_was_refused(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for kind in REASONS:
        with pytest.raises(OSError, match=r"."):
            open_file(odd_file(tmp_path, kind)).close() if kind != "sparse" else read_bytes(odd_file(tmp_path, kind), 9)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_may_be_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    assert read_text(link, 100) == "text"
    with pytest.raises(OSError, match="symbolic links"):
        read_bytes(link, 100, os.O_NOFOLLOW)


def test_a_name_with_a_zero_is_no_path() -> None:
    with pytest.raises(OSError, match="null byte"):
        read_bytes(Path("a\0b"), 100)


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1 << 20)))
    assert len(read_gzip(path, 1 << 20)) == 1 << 20
    with pytest.raises(OSError, match="it is larger than 512 KiB"):
        read_gzip(path, 512 << 10)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
def test_json_has_a_bounded_depth(depth: int) -> None:
    with pytest.raises(ValueError, match="nested"):
        json_value("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="nested"):
        json_value('{"a":' * depth + "1" + "}" * depth)


def test_json_of_the_greatest_depth_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert json.dumps(read_json(path)).count("[") == MAX_DEPTH


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "1" * 5000, "\x00"])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        json_value(text)


def test_what_others_can_write_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    assert read_trusted(path, 100) == b"text"
    path.chmod(0o666)
    with pytest.raises(StoreError, match="every user may write"):
        read_trusted(path, 100)
    monkeypatch.setenv(ownership.TRUST_OWNER.name, " 1")
    assert read_trusted(path, 100) == b"text"


def test_files_of_the_package_are_read() -> None:
    assert "h200" in package_text("blocktune.kernels.hardware", CATALOGUE_FILE)
