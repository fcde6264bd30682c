"""The first view of a report: the user's own winners, predictions included, then those that ship."""

from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.values.config import Origin
from blocktune.tuner.cost.bands import predicted_text
from tests.support.pages.browser import Page


def opened(browser: Any, tune: Any, folder: Path) -> Page:
    """A report of the test's own store."""
    pytest.importorskip("altair", reason="charts need altair")
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python")
    result = tune("report", "--out", folder / "report.html")
    assert result.exit_code == 0, result.output
    return Page(browser, folder / "report.html")


def test_a_report_begins_with_the_newest_run_and_marks_predictions(
    browser: Any, tune: Any, winner: Any, tmp_path: Path
) -> None:
    unmeasured = {"time_us": None, "default_time_us": None, "paper_time_us": None, "speedup_over_default": None}
    tune.store(winner(origin=Origin.PREDICTED, **unmeasured))
    best = winner()
    predicted = predicted_text(790.0, best.config.kernel, best.shape, best.device)
    page = opened(browser, tune, tmp_path)
    assert page.page.locator("main > section").first.get_attribute("id") == "runs"
    assert page.text("#last-run").startswith(
        f"NVIDIA H200, b2 h32 s8192 d64 bf16: {winner().config.label} takes {predicted}, predicted; "
    )
    assert "winners that ship with blocktune" in page.text("#shipped-runs summary")
    assert page.page.locator("#curve-stages").count() == 0, "without a sweep there is nothing to draw"
    assert page.problems == []
    page.close()


def test_a_default_that_won_is_called_that(browser: Any, tune: Any, winner: Any, tmp_path: Path) -> None:
    best = winner()
    tune.store(winner(config=best.default, time_us=best.default_time_us, speedup_over_default=1.0))
    page = opened(browser, tune, tmp_path)
    assert page.text("#last-run").endswith("takes 975.0 µs; it is the default.")
    page.close()


def test_without_a_run_the_report_says_how_to_make_one(browser: Any, tune: Any, tmp_path: Path) -> None:
    page = opened(browser, tune, tmp_path)
    assert "`tune run --seq 8192 --dim 64`" in page.text("#runs-body .message")
    page.close()
