"""What a stored winner is compared with: today's default, measured or without a figure."""

from dataclasses import replace

import pytest

from blocktune.db.records.records import Best
from blocktune.db.rivals import with_todays_rivals
from blocktune.db.store import ResultStore
from blocktune.kernels.base.paper_rule import first_paper_config
from blocktune.kernels.registry import kernels_for


@pytest.fixture
def today(best: Best) -> Best:
    """The winner, compared with what the kernels have today; it is neither of them."""
    kernels = kernels_for(best.shape, best.device.limits)
    default = kernels[0].default_config(best.shape, best.device.limits)
    paper = first_paper_config(kernels, best.shape, best.device.limits)
    assert best.config not in (default, paper)
    return replace(best, default=default, default_time_us=121.0, paper=paper, paper_time_us=150.0)


def test_a_figure_against_todays_default_stays(today: Best) -> None:
    assert today.speedup_over_default is not None
    assert with_todays_rivals(today) == today


def test_a_figure_against_another_default_goes(today: Best) -> None:
    assert today.default is not None
    stale = replace(today, default=replace(today.default, num_stages=1))
    found = with_todays_rivals(stale)
    assert (found.default, found.default_time_us) == (today.default, None)
    assert (found.speedup_over_default, found.speedup_low, found.speedup_high) == (None, None, None)
    assert (found.config, found.time_us) == (today.config, today.time_us)


def test_a_winner_that_is_todays_default_is_as_fast_as_it(today: Best) -> None:
    assert today.default is not None
    winner = replace(today, config=today.default, default=replace(today.default, num_stages=1))
    found = with_todays_rivals(winner)
    assert (found.default, found.default_time_us) == (winner.config, winner.time_us)
    assert (found.speedup_over_default, found.speedup_low, found.speedup_high) == (1.0, 1.0, 1.0)
    alone = replace(found, default_time_us=None, speedup_over_default=None, speedup_low=None, speedup_high=None)
    assert with_todays_rivals(alone) == found, "the only finalist was never timed against itself"
    predicted = replace(winner, time_us=None, predicted_us=3.0)
    assert with_todays_rivals(predicted).speedup_over_default is None


def test_another_paper_rule_loses_its_time(today: Best) -> None:
    assert today.paper is not None
    found = with_todays_rivals(replace(today, paper=replace(today.paper, block_n=16)))
    assert (found.paper, found.paper_time_us) == (today.paper, None)


def test_what_was_never_compared_stays_so(today: Best) -> None:
    alone = replace(today, default=None, default_time_us=None, paper=None, paper_time_us=None)
    assert with_todays_rivals(alone) == alone


def test_an_export_compares_with_todays_default(today: Best, sqlite_store: ResultStore) -> None:
    assert today.default is not None
    assert sqlite_store.set_best(replace(today, default=replace(today.default, num_stages=1)))
    (exported,) = sqlite_store.export_json()["bests"]
    assert exported["default"] == today.default.to_json()
    assert exported["default_time_us"] is exported["speedup_over_default"] is None
