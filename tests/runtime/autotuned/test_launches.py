"""What is counted of launches: a file of lines that any process adds to, and nothing waits for."""

import json
from pathlib import Path

import pytest

from blocktune.kernels.files import count_file
from blocktune.kernels.values.errors import StoreError
from blocktune.runtime.autotuned.config import LaunchProblem
from blocktune.runtime.autotuned.launches import Kind, Launches, append_launches, launches_path, read_launches

KIND = Kind("nvidia h200|9.0|132", "m:kernel", LaunchProblem.of({"n": 8}))
LINE = {"device": KIND.device, "kernel": KIND.kernel, "problem": KIND.problem.document}
COUNTS = {"hits": 1, "misses": 0, "seconds": 0.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "launches.jsonl"


def test_counts_of_processes_are_added_up(path: Path) -> None:
    other = Kind(KIND.device, "m:other", KIND.problem)
    append_launches(path, {KIND: Launches(hits=3, misses=1, seconds=2.5), other: Launches(hits=1)})
    append_launches(path, {KIND: Launches(hits=4)})
    assert read_launches(path) == {KIND: Launches(hits=7, misses=1, seconds=2.5), other: Launches(hits=1)}
    assert path.stat().st_mode & 0o077 == 0


def test_the_file_stays_within_its_bound_and_keeps_the_frequent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_file, "MAX_BYTES", 4_000)
    monkeypatch.setattr(count_file, "MAX_KINDS", 8)
    for size in range(200):
        append_launches(
            path, {KIND: Launches(hits=5), Kind("x", "m:f", LaunchProblem.of({"n": size})): Launches(hits=1)}
        )
        assert path.stat().st_size <= 4_000
    assert read_launches(path)[KIND] == Launches(hits=5 * 200)


@pytest.mark.parametrize(
    "line",
    [
        b'{"device": "x"',
        b"[]",
        b"\xff\xfe",
        json.dumps(LINE | COUNTS | {"hits": -1}).encode(),
        json.dumps(LINE | COUNTS | {"misses": True}).encode(),
        json.dumps(LINE | COUNTS | {"seconds": float("nan")}).encode(),
        json.dumps(LINE | COUNTS | {"kernel": "x" * 1000}).encode(),
        json.dumps(LINE | COUNTS | {"problem": "[1]"}).encode(),
    ],
)
def test_a_broken_line_costs_itself(path: Path, line: bytes) -> None:
    append_launches(path, {KIND: Launches(hits=1)})
    with path.open("ab") as file:
        file.write(line)
    append_launches(path, {KIND: Launches(hits=2)})
    assert read_launches(path) == {KIND: Launches(hits=3)}


def test_a_place_that_is_no_file_is_named(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(StoreError, match="BLOCKTUNE_LAUNCHES"):
        read_launches(path)


def test_the_place_is_in_the_state_directory_unless_the_environment_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launches_path() is None  # as tests have it
    monkeypatch.setenv("BLOCKTUNE_LAUNCHES", "/x/y.jsonl")
    assert launches_path() == Path("/x/y.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BLOCKTUNE_LAUNCHES", "~/y.jsonl")
    assert launches_path() == tmp_path / "y.jsonl"
    monkeypatch.delenv("BLOCKTUNE_LAUNCHES")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert launches_path() == tmp_path / "blocktune" / "launches.jsonl"
    assert read_launches(tmp_path / "none.jsonl") == {}
