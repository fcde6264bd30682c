"""The command `tune` where another package has one."""

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.explain.checks import examine

RUN = "import sys; sys.argv[0] = 'tune'; from blocktune.cli.__main__ import tune; tune()"


def install(folder: Path, name: str, module: str) -> None:
    """Lay down a package with a command `tune`, which repeats its words."""
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[console_scripts]\ntune = {module}:main\n")
    (folder / f"{module}.py").write_text("import sys\ndef main():\n    print('theirs', *sys.argv[1:])\n    return 9\n")


def said(folder: Path, *words: str) -> tuple[int, str]:
    """Return how `tune` ends and what it prints, with the packages of a folder in front of those that are installed."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); {RUN}"
    done = subprocess.run([sys.executable, "-P", "-c", code, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_the_command_of_torchtune_is_left_to_it(tmp_path: Path) -> None:
    install(tmp_path, "torchtune", "their_tune")
    assert said(tmp_path, "run", "recipe") == (9, "theirs run recipe\n")


def test_ray_keeps_its_words_and_we_keep_ours(tmp_path: Path) -> None:
    install(tmp_path, "ray", "their_tune")
    assert said(tmp_path, "list-trials", "folder") == (9, "theirs list-trials folder\n")
    code, text = said(tmp_path, "--version")
    assert (code, text.split()[0]) == (0, "blocktune")


def scripts(folder: Path, tune: str | None) -> Path:
    """Lay down a folder of scripts, with one `tune` of a module."""
    (folder / "bin").mkdir()
    (folder / "bin" / "blocktune").touch()
    if tune is not None:
        (folder / "bin" / "tune").write_text(f"#!/usr/bin/python\nfrom {tune} import main\nmain()\n")
    return folder / "bin"


@pytest.mark.parametrize(
    ("script", "value"), [("their_tune", "torchtune"), ("blocktune.cli.__main__", "blocktune"), (None, "missing")]
)
def test_the_doctor_says_whose_command_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, value: str
) -> None:
    install(tmp_path, "torchtune", "their_tune")
    install(tmp_path, "blocktune", "blocktune.cli.__main__")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(scripts(tmp_path, script)))
    (finding,) = command_findings(tmp_path)
    assert finding.value == value
    assert "also in torchtune" in finding.meaning
    assert "Type `blocktune`" in finding.fix


def command_findings(folder: Path) -> list[Any]:
    return [each for each in examine(str(folder / "none.db")) if each.name == "command tune"]


def test_the_doctor_says_that_the_command_went_with_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(scripts(tmp_path, None)))
    monkeypatch.setattr("blocktune.cli.explain.checks.tune_commands", list)
    (finding,) = command_findings(tmp_path)
    assert finding.value == "missing"
    assert "removed it with another package" in finding.meaning
