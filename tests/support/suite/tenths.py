"""`--tenth 3`: which cases take their turn in this run, of those that continuous integration leaves to the night.

A case has its tenth by its name, so ten runs with ten tenths are all cases, on however many workers.
"""

import zlib

import pytest

TENTHS = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tenth", type=int, choices=range(TENTHS), help="Mark the cases of this tenth, for -m `tenth` to choose them."
    )


def tenth_of(name: str) -> int:
    """Return the tenth of a case, or of something else that takes turns, by its name."""
    return zlib.crc32(name.encode()) % TENTHS


def mark_turns(items: list[pytest.Item], tenth: int | None) -> None:
    """Mark the first case of every test as `first`, and the cases of the tenth that is named as `tenth`."""
    tests: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test not in tests and not item.get_closest_marker("exhaustive"):
            tests.add(test)
            item.add_marker("first")
        if tenth_of(item.nodeid.partition("@")[0]) == tenth:
            item.add_marker("tenth")
