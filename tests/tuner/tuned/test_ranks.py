"""Ranks with a fake GPU each, which do not agree on what is the fastest config, launch one kernel."""

import json
import subprocess

import pytest

from tests.support.programs import ROOT, program
from tests.support.triton_modes import compiled_here

pytestmark = compiled_here


@pytest.mark.exhaustive
def test_ranks_agree_and_end_whatever_happens_to_one_of_them() -> None:
    result = subprocess.run(
        [*program("autotune_ranks"), "--fake"], capture_output=True, text=True, timeout=500, cwd=ROOT
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["scenario"], row["ended"], row["tuned_in_all"], row["disagreements"]) for row in rows] == [
        ("all launch at once", 4, 1, 0),
        ("one rank never launches", 4, 1, 0),
        ("one rank comes late", 4, 1, 0),
        ("the rank that tunes dies", 3, 1, 0),
        ("the store is away", 4, 4, 0),
    ], result.stderr
