"""A table that grew by updates is the table that a whole sweep gives, in Python and in the page's copy."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.report.live_table import LiveTable, apply_update
from blocktune.tuner.report.sweep_table import sweep_table
from blocktune.tuner.report.trial_columns import in_order

pytestmark = pytest.mark.triton_free

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"
COUNT = 60


@cache
def sweep() -> Sweep:
    """The first trials of a recorded sweep, its anchor among them."""
    whole = load_sweep(SWEEPS / "h200-b2-h32-s8192-d64-bf16.sweep.json.gz")
    anchor = next(trial for trial in whole.trials if trial.relative_to_anchor == 1.0)
    others = [trial for trial in in_order(whole.trials) if trial is not anchor]
    return replace(whole, trials=(*others[: COUNT - 1], anchor))


def part(count: int) -> Sweep:
    """The sweep when this many of its trials were made."""
    return replace(sweep(), trials=tuple(in_order(sweep().trials)[:count]))


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_a_table_grows_to_what_the_whole_sweep_gives() -> None:
    live = LiveTable(part(1))
    page = copied(live.table)
    for count in (2, 3, 20, COUNT):
        known = len(live.table["columns"]["kernel"])
        update = live.update(part(count), part(count).trials[known:])
        apply_update(page, copied(update))
    whole = sweep_table(sweep())
    assert whole["importance"] != []
    assert live.table == whole | {"empty_cells": live.table["empty_cells"]}
    assert page == copied(live.table)


def test_an_update_holds_the_new_rows_alone() -> None:
    live = LiveTable(part(20))
    update = live.update(part(23), part(23).trials[20:])
    assert update["rows"] == [20, 21, 22]
    assert {len(column) for column in update["columns"].values()} == {3}


def test_a_trial_that_was_made_again_replaces_its_row() -> None:
    live = LiveTable(part(5))
    first = part(5).trials[0]
    assert first.time_us is not None
    again = replace(first, time_us=2 * first.time_us)
    now = replace(part(5), trials=(again, *part(5).trials[1:]))
    assert live.update(now, [again])["rows"] == [0]
    assert live.table["columns"]["time_us"][0] == again.time_us
    assert len(live.table["columns"]["time_us"]) == 5


def test_parameters_are_judged_again_when_there_are_a_quarter_more_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def judge(sweep: Sweep) -> list[dict[str, Any]]:
        judged.append(len(sweep.trials))
        return []

    live = LiveTable(part(20))
    monkeypatch.setattr("blocktune.tuner.report.live_table.parameter_importance", judge)
    for count in range(21, 33):
        live.update(part(count), part(count).trials[count - 1 :])
    assert judged == [25, 32]
