"""A tuning run that is killed at random points goes on from what was stored, loses nothing of it and repeats none."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktune.db.records.records import Outcome
from tests.support.models import landscape
from tools import program

pytestmark = pytest.mark.triton_free

MEMORY = Path("/dev/shm")
KILLS = 4


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where possible: a killed process loses nothing that the kernel has, whatever the disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.exhaustive
def test_killed_runs_lose_nothing_and_measure_nothing_twice(folder: Path) -> None:
    command = [*program("stores.killed_runs"), str(folder), str(KILLS), "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["killed"] == KILLS
    tried = [c for c in landscape.SPACE.feasible if c.kernel == "pointers" and c.num_stages in (2, 3)]
    right = [c for c in tried if landscape.measurement(c, 0).outcome is Outcome.OK and landscape.fits(c)]
    fastest = min(right, key=lambda config: landscape.time_us(config, 0))
    assert told["winners"]
    assert all(winner == [fastest.label, len(tried)] for winner in told["winners"])
