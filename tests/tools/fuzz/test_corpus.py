"""What the fuzzers have found is read again: `python -m tools.fuzz` adds to it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import UsageError
from tools.fuzz import corpus
from tools.fuzz.drawn import odd_files, odd_inputs, odd_requests
from tools.fuzz.parsers import MAX_MESSAGE, PARSERS, Parser, judge
from tools.fuzz.requests import stop_server

SLOW = ("requests", "commands")
"""What starts a server, or runs commands."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in SLOW else name for name in PARSERS]
)
def test_every_input_that_was_found_ends_well(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "requests":
        pytest.importorskip("uvicorn", reason="`tune ui` needs uvicorn")
        request.addfinalizer(stop_server)
    monkeypatch.chdir(Path.cwd())  # and back: commands run in a folder of their own
    inputs = corpus.load(corpus.archive_of(name))
    assert inputs or name in SLOW
    for each in [*PARSERS[name].seeds(), *inputs]:
        judge(PARSERS[name], each)


def test_odd_inputs_end_well_and_are_the_same_again() -> None:
    assert [*odd_inputs([b"a", b"bc"], 50, 1)] == [*odd_inputs([b"a", b"bc"], 50, 1)]
    assert odd_files(Path(), 200, 7) == (0, 0, "")


@pytest.mark.exhaustive
def test_the_live_page_answers_odd_requests() -> None:
    pytest.importorskip("uvicorn", reason="`tune ui` needs uvicorn")
    assert odd_requests(Path(), 200, 7) == (0, 0, "")


def raising(error: Exception) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        raise error

    return read


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), RecursionError(), UsageError("x" * (MAX_MESSAGE + 1)), UsageError("\x1b[31mred")],
    ids=repr,
)
def test_what_no_parser_may_do_is_found(error: Exception) -> None:
    with pytest.raises((AssertionError, ValueError, RecursionError)):
        judge(Parser((raising(error),), list), b"")


def test_an_error_of_ours_ends_well() -> None:
    judge(Parser((raising(UsageError("`seq` must be positive.")),), list), b"")


def test_equal_inputs_are_an_equal_archive(tmp_path: Path) -> None:
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"
    inputs = [b"b", b"", b"aa", b"x" * (corpus.MOST_BYTES + 1)]
    assert corpus.save(first, inputs) == 3
    corpus.save(second, reversed(inputs))
    assert first.read_bytes() == second.read_bytes()
    assert corpus.load(first) == [b"", b"b", b"aa"]
    assert corpus.load(tmp_path / "none.zip") == []
