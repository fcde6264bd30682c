"""A bounded number of drawn calls against float64; `make fuzz` goes on for as long as it is asked to."""

import os
from pathlib import Path

import pytest

from tools.differential.__main__ import fuzz
from tools.differential.runs.parent import Setup
from tools.pages.checks.differential_tables import read_differential

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

CASES_PER_CLASS = 8
"""Few: a new class compiles, and more classes see more."""

ENTRIES = {"attention": 280, "flash_attn_func": 40, "flash_attn_varlen_func": 40, "flash_attn_with_kvcache": 40}


@pytest.mark.parametrize("entry", ENTRIES)
def test_drawn_calls_are_right_within_their_bounds(entry: str, tmp_path: Path) -> None:
    """A failure names its case: `PYTHONPATH=. python -P -m tools.differential --case CASE` runs it again."""
    out = tmp_path / "here.differential.json"
    jobs = min(8, os.cpu_count() or 1)
    fuzz(
        Setup(), seed=1, seconds=1000, cases=ENTRIES[entry], per_class=CASES_PER_CLASS, jobs=jobs, entry=entry, out=out
    )
    document = read_differential(out)
    assert document["failures"] == []
    assert document["problems"] == []
    assert document["cases"] == ENTRIES[entry]
