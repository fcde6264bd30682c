"""Commands that only read need no permission to write."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.open_folders import let_everyone_through

READING = (
    ("list",),
    ("best", "--seq", 8192, "--dim", 64, "--device", "h200"),
    ("export", "-"),
    ("export", "-", "--format", "triton"),
    ("buckets",),
)


@pytest.fixture
def unwritable(tune, winner) -> Iterator[Path]:
    """The folder of a store with a winner, which this process may read and not write."""
    tune.store(winner())
    for words in (*READING, ("gc",)):  # imports what they need: another user may not be able to
        tune(*words)
    folder = tune.db.parent
    root = os.geteuid() == 0  # to whom permissions mean nothing
    if root:
        let_everyone_through(folder)
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    yield folder
    if root:
        os.seteuid(0)
    folder.chmod(0o755)


@pytest.mark.usefixtures("unwritable")
@pytest.mark.parametrize("words", READING, ids=lambda words: " ".join(map(str, words[:4])))
def test_a_store_in_a_directory_that_cannot_be_written_is_read(tune, words: tuple[object, ...]) -> None:
    result = tune(*words)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("words", READING, ids=lambda words: " ".join(map(str, words[:4])))
def test_what_no_call_gets_is_shown_with_a_warning(tune, winner, words: tuple[object, ...]) -> None:
    tune.store(winner())
    tune.db.chmod(0o666)
    result = tune(*words)
    assert result.exit_code == 0
    assert f"every user may write {tune.db}" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("unwritable")
def test_what_writes_says_so(tune) -> None:
    result = tune("gc", "--apply")
    assert result.exit_code == 5
    assert "write permission" in result.stderr
