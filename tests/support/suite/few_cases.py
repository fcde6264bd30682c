"""`@pytest.mark.few(4)`: `make test` runs four of the test's cases, `make test-all` the others as well."""

from collections import defaultdict

import pytest


def mark_others_exhaustive(items: list[pytest.Item]) -> None:
    """Mark all but a few cases of every test that is marked so as exhaustive."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not any(map(item.get_closest_marker, ("exhaustive", "gpu"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        chosen = {item.nodeid for item in spread(alike, alike[0].get_closest_marker("few").args[0])}
        for item in alike:
            if item.nodeid not in chosen:
                item.add_marker("exhaustive")


def spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return this many cases: each has the most values of parameters that no chosen one has, and is far from those."""
    seen: set[tuple[str, int]] = set()
    chosen: list[int] = []
    while len(chosen) < min(count, len(cases)):
        left = (place for place in range(len(cases)) if place not in chosen)
        chosen.append(max(left, key=lambda place: (len(_values(cases[place]) - seen), _distance(place, chosen))))
        seen |= _values(cases[chosen[-1]])
    return [cases[place] for place in chosen]


def _distance(place: int, others: list[int]) -> int:
    return min((abs(place - other) for other in others), default=0)


def _values(case: pytest.Item) -> set[tuple[str, int]]:
    """Return which value of each parameter the case has."""
    return set(case.callspec.indices.items())  # type: ignore[attr-defined]
