"""A few cases of a test stand for all of them."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.suite.few_cases import mark_others_exhaustive, spread


class Case(SimpleNamespace):
    """What is read of a collected test."""

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = True


def cases(few: int | None, **choices: int) -> list[Any]:
    """Return a case for every combination of this many values of each parameter."""
    marks = {} if few is None else {"few": SimpleNamespace(args=(few,))}
    return [
        Case(
            nodeid=f"test.py::test[{indices}]",
            marks=dict(marks),
            callspec=SimpleNamespace(indices=dict(zip(choices, indices, strict=True))),
        )
        for indices in itertools.product(*map(range, choices.values()))
    ]


def test_the_first_ones_chosen_have_every_value_of_every_parameter() -> None:
    chosen = [case.callspec.indices for case in spread(cases(None, dtype=2, mask=3, width=3), 3)]
    assert {one["dtype"] for one in chosen} == {0, 1}
    assert {one["mask"] for one in chosen} == {one["width"] for one in chosen} == {0, 1, 2}


def test_of_one_parameter_they_are_far_from_each_other() -> None:
    assert [case.callspec.indices["width"] for case in spread(cases(None, width=9), 3)] == [0, 8, 4]


@pytest.mark.parametrize(("few", "left"), [(None, 6), (2, 2), (6, 6), (9, 6)])
def test_the_others_are_exhaustive(few: int | None, left: int) -> None:
    items = cases(few, dtype=2, mask=3)
    mark_others_exhaustive(items)
    assert sum("exhaustive" not in item.marks for item in items) == left
