"""Dear cases are left to the night, and no file of tests with them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.suite import dear_cases


class Case(SimpleNamespace):
    """What is read of a collected test."""

    @property
    def location(self) -> tuple[str]:
        return (self.nodeid.partition("::")[0],)

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = True


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "dear_cases.txt"
    path.write_text("a.py::test_gone 7.0\na.py::test_one 5.0\nb.py::test_one[x y] 9.5\nb.py::test_two 3.0\n")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("def test_one():\ndef test_two():\n")
    monkeypatch.setattr(dear_cases, "FILE", path)
    monkeypatch.setattr(dear_cases, "ROOT", tmp_path)
    return path


@pytest.mark.usefixtures("file")
def test_a_file_keeps_its_cheapest_case() -> None:
    names = ("a.py::test_one", "a.py::test_two", "b.py::test_one[x y]", "b.py::test_two", "c.py::test_one")
    items: list[Any] = [Case(nodeid=name, marks={}) for name in names]
    dear_cases.mark_dear_exhaustive(items)
    assert [item.nodeid for item in items if item.marks] == ["a.py::test_one", "b.py::test_one[x y]"]


def test_a_run_replaces_the_costs_of_what_ran_and_drops_what_is_gone(file: Path) -> None:
    dear_cases.write({"a.py::test_one": 0.3, "a.py::test_two": 2.04, "b.py::test_two": 4.0})
    assert file.read_text() == "a.py::test_two 2.0\nb.py::test_one[x y] 9.5\nb.py::test_two 4.0\n"


def test_the_list_names_each_case_once_and_in_order() -> None:
    lines = dear_cases.FILE.read_text().splitlines()
    assert lines == sorted(set(lines))
    assert all(seconds >= dear_cases.DEAR_SECONDS for seconds in dear_cases.read().values())
