"""Cases that take many processor seconds are exhaustive: `make test` leaves them to the night.

The file lists them with their cost, which `pytest --costs` measures, processes that a test starts included. It knows
nothing of a new test, which `make test` runs therefore. Every file of tests keeps its cheapest case.
"""

import os
from collections.abc import Generator, Mapping
from typing import Any

import pytest

from tests.support.suite import warm_python
from tests.support.suite.shared_files import file_of
from tools import ROOT

FILE = ROOT / "tests/data/dear_cases.txt"
DEAR_SECONDS = 0.4
COST = "processor_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--costs`."""
    parser.addoption("--costs", action="store_true", help="Measure the cases, and list those that are dear.")


def pytest_configure(config: pytest.Config) -> None:
    """Measure, where that is asked for."""
    if config.getoption("--costs"):
        config.pluginmanager.register(Meter())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Writer())


def mark_dear_exhaustive(items: list[pytest.Item]) -> None:
    """Mark the dear cases as exhaustive, but for the cheapest one of a file that has no other."""
    costs = read()
    files = {name.partition("::")[0] for name in costs}
    kept: set[str] = set()
    by_cost = sorted((item for item in items if file_of(item) in files), key=lambda item: costs.get(item.nodeid, 0.0))
    for item in (item for item in by_cost if not any(map(item.get_closest_marker, ("exhaustive", "gpu")))):
        if item.nodeid in costs and file_of(item) in kept:
            item.add_marker("exhaustive")
        kept.add(file_of(item))


def read() -> dict[str, float]:
    """Return the processor seconds of every dear case."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {name: float(seconds) for name, _, seconds in (line.rpartition(" ") for line in lines)}


def write(measured: Mapping[str, float]) -> None:
    """Replace what the file says of the cases that ran, and drop those of tests that are gone."""
    costs = sorted((name, seconds) for name, seconds in (read() | measured).items() if seconds >= DEAR_SECONDS)
    FILE.write_text("".join(f"{name} {seconds:.1f}\n" for name, seconds in costs if _has_test(name)))


def _has_test(case: str) -> bool:
    path, _, test = case.partition("[")[0].partition("::")
    return (ROOT / path).exists() and f"def {test.rpartition('::')[2]}(" in (ROOT / path).read_text()


class Meter:
    """Measures each case without what it shares with others."""

    def __init__(self) -> None:
        self._shared = self._began = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        began = _seconds()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._shared += _seconds() - began

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        self._began, self._shared = _seconds(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.user_properties.append((COST, _seconds() - self._began - self._shared))
        return (yield)


class Writer:
    """Collects the costs, those of workers too, and writes them at the end."""

    def __init__(self) -> None:
        self._costs: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._costs[report.nodeid.partition("@")[0]] = float(str(dict(report.user_properties)[COST]))

    def pytest_sessionfinish(self) -> None:
        write(self._costs)


def _seconds() -> float:
    return sum(os.times()[:4]) + warm_python.used.processor_seconds
