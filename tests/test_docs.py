"""The documents compute what they say."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXECUTABLE = sorted(path for path in (ROOT / "docs").glob("*.md") if ">>> " in path.read_text(encoding="utf-8"))


def test_the_worked_numbers_are_executable() -> None:
    assert ROOT / "docs" / "worked_numbers.md" in EXECUTABLE


@pytest.mark.parametrize("path", EXECUTABLE, ids=lambda path: path.name)
def test_every_example_gives_what_it_shows(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = doctest.testfile(str(path), module_relative=False, encoding="utf-8", optionflags=doctest.REPORT_NDIFF)
    assert outcome.attempted > 10
    assert outcome.failed == 0, capsys.readouterr().out


def test_a_wrong_number_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.md"
    wrong.write_text("```python\n>>> 1 + 1\n3\n\n```\n")
    assert doctest.testfile(str(wrong), module_relative=False).failed == 1
    assert "Expected" in capsys.readouterr().out
