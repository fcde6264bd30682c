"""What every test shares.

Tests marked `gpu` are skipped, with the reason, where there is no GPU. Tests of the compiler are left out where Triton
interprets, and tests that run kernels where nothing can. What tests miss is not written among the misses of the user.
Worker processes take turns with the GPUs. Triton's interpreter finds things out once. Ctrl-C reaches the processes that
tests start, even if the run itself is a background job, in which the shell lets it be ignored.
Every test draws its own random numbers (`same_draws`), whichever ran before it.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktune.kernels.hardware.driver import read_driver
from tests.support import recording
from tests.support.compiles import remembered
from tests.support.quick_interpreter import do_less
from tests.support.suite import dear_cases, tenths
from tests.support.suite.few_cases import mark_others_exhaustive
from tests.support.suite.kept_objects import pytest_collection
from tests.support.suite.same_draws import pytest_runtest_setup
from tests.support.suite.shared_files import keep_files_together
from tests.support.suite.worker_gpus import take_turns
from tests.support.triton_modes import ABSENT, INTERPRETED

# a garbage collector with less to do, and the same draws in every run
__all__ = ["pytest_collection", "pytest_runtest_setup"]

os.environ |= {"BLOCKTUNE_MISSES": "off", "BLOCKTUNE_LAUNCHES": "off"}  # for the processes that tests start, too
take_turns()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if INTERPRETED:
    do_less()


def pytest_addoption(parser: pytest.Parser) -> None:
    for each in (recording, tenths, dear_cases, remembered):
        each.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    for each in (recording, dear_cases, remembered):
        each.pytest_configure(config)


@pytest.fixture(autouse=True)
def no_incidents() -> Iterator[None]:
    """Fail a test in which PyTorch stepped in for an error of ours, which no result would show."""
    yield
    incidents = sys.modules.get("blocktune.kernels.files.incidents")
    counts = getattr(incidents, "counts", {})
    found = dict(counts)
    counts.clear()
    assert found == {}


@pytest.fixture(scope="session")
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests that do not count compiles keep compiled code, one folder for all workers of a run."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.hookimpl(tryfirst=True)  # -m reads the markers that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_others_exhaustive(items)
    if not config.getoption("--costs"):
        dear_cases.mark_dear_exhaustive(items)
    tenths.mark_turns(items, config.getoption("--tenth"))
    keep_files_together(items)
    _leave_out(config, items, {marker for marker, absent in ABSENT.items() if absent})
    _skip_without_gpu(items)


def _leave_out(config: pytest.Config, items: list[pytest.Item], markers: set[str]) -> None:
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if any(item.get_closest_marker(marker) for marker in markers) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    report = read_driver()
    if not report.devices:
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=report.problem))
