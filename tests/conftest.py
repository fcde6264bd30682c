"""What every test shares: tests marked `gpu` are skipped, with the reason, where there is no GPU, and what tests miss
is not written among the misses of the user."""

import os

import pytest

from blocktune.kernels.hardware.driver import read_driver
from tests.support.recording import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]  # --record

os.environ["BLOCKTUNE_MISSES"] = "off"  # for the processes that tests start, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    report = read_driver()
    if not report.devices:
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=report.problem))
