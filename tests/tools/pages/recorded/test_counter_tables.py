"""The tables of what Nsight Compute counted, with a file whose numbers are made up."""

import shutil
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import UsageError
from tests.support.pages.reports import SYNTHETIC_COUNTERS
from tools.pages.pages import with_results
from tools.pages.recorded.counter_tables import NO_COUNTERS

PAGE = "<!-- results *.counters.csv -->\n<!-- /results -->"


def test_every_file_of_counters_becomes_a_table(tmp_path: Path) -> None:
    for name in ("h200-a", "h200-b"):
        shutil.copy(SYNTHETIC_COUNTERS, tmp_path / f"{name}.counters.csv")
    page = with_results(PAGE, tmp_path)
    assert page.count("| time | ") == 2
    assert page.index("h200-a.counters.csv") < page.index("h200-b.counters.csv")
    assert "| 2,500.0 µs | " in page
    assert "Of the waiting warps: 38 % gmma, 25 % short scoreboard, 19 % wait, 12 % long scoreboard." in page
    assert with_results(page, tmp_path) == page


def test_without_a_file_the_page_says_how_to_record_one(tmp_path: Path) -> None:
    assert NO_COUNTERS in with_results(PAGE, tmp_path)


def test_counters_that_do_not_say_of_what_they_are_are_refused(tmp_path: Path) -> None:
    bare = SYNTHETIC_COUNTERS.read_text().partition("\n")[2]
    (tmp_path / "bare.counters.csv").write_text(bare)
    with pytest.raises(UsageError, match=r"bare\.counters\.csv does not"):
        with_results(PAGE, tmp_path)
