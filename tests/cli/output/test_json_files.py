"""`--out`: a place that cannot be written is refused before anything is measured for it."""

import os
from pathlib import Path

import pytest

from blocktune.cli.output.json_files import writable
from blocktune.kernels.values.errors import UsageError

SHAPE = ("--seq", 512, "--dim", 64)
COMMANDS = {
    "bench": SHAPE,
    "lab calibrate": (),
    "ladder": SHAPE,
    "lab noise": SHAPE,
    "profile": SHAPE,
    "lab rematch": ("a.db", "b.db"),
    "lab replay": (),
    "report": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_folder_is_seen_before_the_work(command: str, tune, tmp_path: Path) -> None:
    place = tmp_path / "missing" / "out.json"
    result = tune(*command.split(), *COMMANDS[command], "--out", place)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{place} cannot be written: the folder {place.parent} is missing" in result.stderr.replace("\n", " ")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it is a folder\. Name a file in it"):
        writable(tmp_path)


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:  # root may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UsageError, match="is not writable"):
        writable(tmp_path / "out.json")


def test_a_file_of_a_folder_that_is_there_and_none_at_all_may_be_written(tmp_path: Path) -> None:
    assert writable(tmp_path / "out.json") == tmp_path / "out.json"
    assert writable(None) is None
