"""Ten tenths are all cases, and a case has the same one on every machine."""

from types import SimpleNamespace
from typing import Any

from tests.support.suite.tenths import TENTHS, mark_turns, tenth_of


class Case(SimpleNamespace):
    """What is read of a collected test."""

    def get_closest_marker(self, name: str) -> Any:
        return name in self.marks

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def cases(*, exhaustive: bool = False) -> list[Any]:
    marks = ["exhaustive"] if exhaustive else []
    return [Case(nodeid=f"test.py::test[{number}]@group", marks=list(marks)) for number in range(100)]


def test_each_case_takes_its_turn_once() -> None:
    turns = [cases() for _ in range(TENTHS)]
    for tenth, items in enumerate(turns):
        mark_turns(items, tenth)
    assert all(sum("tenth" in item.marks for item in same) == 1 for same in zip(*turns, strict=True))
    assert all(any("tenth" in item.marks for item in items) for items in turns)


def test_without_a_tenth_no_case_has_its_turn() -> None:
    items = cases()
    mark_turns(items, None)
    assert [item.marks for item in items] == [["first"], *[[]] * 99]


def test_an_exhaustive_case_is_not_the_first() -> None:
    items = [*cases(exhaustive=True)[:1], *cases()[1:]]
    mark_turns(items, None)
    assert [place for place, item in enumerate(items) if "first" in item.marks] == [1]


def test_a_name_has_the_same_tenth_everywhere() -> None:
    assert [tenth_of(name) for name in ("a", "b", "tests/test_docs.py::test_links[README]")] == [7, 1, 8]
