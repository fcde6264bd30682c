"""The record of compiled defaults, of GPUs that are not here."""

import json

from tools import ROOT
from tools.checks.compiled_defaults import FEATURED, HEAD_DIMS, PLAIN, is_current, places, problem

ROWS = {row["row"]: row for row in json.loads((ROOT / "tests/data/compiled_defaults.json").read_text())}


def test_no_recorded_default_of_today_fails_to_launch() -> None:
    wanted = [place for place in places(HEAD_DIMS, (*PLAIN, *FEATURED)) if place.label in ROWS]
    today = [ROWS[place.label] for place in wanted if is_current(ROWS[place.label], place)]
    assert len(today) > 400
    assert all(row["outcome"] == "ok" and row["blocks_per_sm"] for row in today)


def test_a_default_that_spills_or_cannot_be_launched_is_named() -> None:
    row = next(iter(ROWS.values())) | {"spill_bytes": 0, "blocks_per_sm": 1, "outcome": "ok"}
    assert problem(row) is None
    assert "spills 65 B a thread" in str(problem(row | {"spill_bytes": 65}))
    assert "cannot be launched" in str(problem(row | {"blocks_per_sm": 0}))
