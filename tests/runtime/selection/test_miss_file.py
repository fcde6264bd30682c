"""The file of misses: where it is, what a broken line costs, and that it does not grow for ever."""

import json
import os
import stat
from pathlib import Path

import pytest

from blocktune.kernels.files import count_file
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.selection.miss_file import append_misses, miss_path, read_misses
from tests.support.fakes.dispatch_fakes import H200, shape_like

pytestmark = pytest.mark.triton_free

SHORT, LONG = shape_like(128), shape_like(2048)
SHORT_MISS, LONG_MISS = (H200.key, SHORT), (H200.key, LONG)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "misses.jsonl"


def test_the_file_is_private(path: Path) -> None:
    append_misses(path, {SHORT_MISS: 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("value", ["off", "OFF", "0", "no", "false"])
def test_the_variable_switches_it_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_MISSES", value)
    assert miss_path() is None


def test_a_home_that_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_MISSES", "~nobody-of-this-name/m.jsonl")
    with pytest.raises(UsageError, match="absolute path"):
        miss_path()


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_MISSES", "~/mine.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert miss_path() == tmp_path / "mine.jsonl"
    monkeypatch.delenv("BLOCKTUNE_MISSES")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert miss_path() == tmp_path / ".local/state/blocktune/misses.jsonl"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    assert miss_path() == tmp_path / "states/blocktune/misses.jsonl"
    for relative in (".", "states", "../states"):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert miss_path() == tmp_path / ".local/state/blocktune/misses.jsonl"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"calls": 3, "device": "x"',
        b"[]",
        b"[" * 100_000,
        b"\xff\xfe",
        json.dumps({"calls": -1, "device": "x", "shape": SHORT.to_json()}).encode(),
        json.dumps({"calls": True, "device": "x", "shape": SHORT.to_json()}).encode(),
        json.dumps({"calls": 1 << 60, "device": "x", "shape": SHORT.to_json()}).encode(),
        json.dumps({"calls": 1, "device": "x" * 1000, "shape": SHORT.to_json()}).encode(),
        json.dumps({"calls": 1, "device": "x", "shape": SHORT.to_json() | {"batch": 0}}).encode(),
        json.dumps({"calls": 1, "device": "x", "shape": None}).encode(),
    ],
)
def test_a_broken_line_costs_itself(path: Path, line: bytes) -> None:
    append_misses(path, {SHORT_MISS: 1})
    with path.open("ab") as file:
        file.write(line)
    append_misses(path, {LONG_MISS: 2})
    assert read_misses(path) == {SHORT_MISS: 1, LONG_MISS: 2}


def test_the_file_stays_within_its_bound_and_keeps_the_frequent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_file, "MAX_BYTES", 20_000)
    monkeypatch.setattr(count_file, "MAX_KINDS", 20)
    for batch in range(1, 200):
        append_misses(path, {LONG_MISS: 5, (H200.key, shape_like(128, batch=batch)): 1})
        assert path.stat().st_size <= 20_000
    found = read_misses(path)
    assert max(found.items(), key=lambda item: item[1]) == (LONG_MISS, 5 * 199)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_waited_for(path: Path, make: object) -> None:
    path.parent.mkdir()
    make(path)  # type: ignore[operator]
    with pytest.raises(StoreError, match="BLOCKTUNE_MISSES"):
        read_misses(path)
    with pytest.raises(OSError, match="misses"):
        append_misses(path, {SHORT_MISS: 1})


def test_a_file_that_is_not_there_holds_no_misses(path: Path) -> None:
    assert read_misses(path) == {}


@pytest.mark.parametrize(
    "text", ["SQLite format 3\0" + "x" * count_file.MAX_BYTES, "Dear Sir or Madam\n", '{"format": 1}\n', "{\n"]
)
def test_a_file_of_others_is_left_as_it_is(path: Path, text: str) -> None:
    """A variable may name a store or a letter by mistake, which would be cut down to the lines that are ours."""
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(OSError, match="it is another file"):
        append_misses(path, {SHORT_MISS: 1})
    assert path.read_text() == text
