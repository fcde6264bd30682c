"""Which commit a measurement names."""

import subprocess
from pathlib import Path

import pytest

from blocktune.kernels.files.variables import COMMIT
from blocktune.tuner.measure.environment import source_commit
from tools import ROOT

pytestmark = pytest.mark.triton_free


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit."""
    monkeypatch.delenv(COMMIT.name, raising=False)
    (tmp_path / "kernel.py").write_text("one\n")
    who = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    for command in (("init", "-q"), ("add", "kernel.py"), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    return tmp_path


def test_a_clone_names_its_commit_and_whether_it_was_changed(clone: Path) -> None:
    head = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert source_commit(clone) == head.stdout.strip()
    (clone / "notes.txt").write_text("not part of the sources\n")
    assert source_commit(clone) == head.stdout.strip()
    (clone / "kernel.py").write_text("two\n")
    assert source_commit(clone) == head.stdout.strip() + "+"


def test_the_sources_that_run_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT.name, raising=False)
    assert source_commit() == source_commit(ROOT)


def test_a_copy_without_history_names_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT.name, raising=False)
    assert source_commit(tmp_path) == ""
    monkeypatch.setenv(COMMIT.name, "c0ffee")
    assert source_commit(tmp_path) == "c0ffee"
