"""Bounded parts of what `make fault-test` does with full counts: tests/support/programs/faults.py."""

import shutil
from pathlib import Path

import pytest

from tests.support.postgres_server import missing_part
from tests.support.programs import io_faults
from tests.support.programs.changed_exports import imports
from tests.support.programs.server_stops import server_stops

exhaustive = pytest.mark.exhaustive


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make the failing calls with")
@pytest.mark.parametrize("errors", [6, pytest.param(100, marks=exhaustive)])
def test_a_failing_disk_loses_nothing_that_was_acknowledged(tmp_path: Path, errors: int) -> None:
    told = io_faults.run(tmp_path, errors, seed=errors)
    assert told["wrong"] == []
    assert told["errors"] == errors


@pytest.mark.parametrize("tried", [500, pytest.param(10_000, marks=exhaustive)])
def test_a_changed_export_is_taken_whole_or_refused(tmp_path: Path, tried: int) -> None:
    lost, wrong, note = imports(tmp_path, tried, seed=tried)
    assert (lost, wrong) == (0, 0)
    assert not note.startswith("0 were taken")


@exhaustive
@pytest.mark.skipif(bool(missing_part()), reason=missing_part())
def test_a_server_that_is_stopped_again_and_again_loses_nothing(tmp_path: Path) -> None:
    assert server_stops(tmp_path, 10, seed=0)[:2] == (0, 0)
