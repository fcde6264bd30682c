"""The tables of split counts are of the shipped decision and of recorded sweeps."""

from pathlib import Path

from tools.pages.pages import with_results
from tools.pages.recorded.split_tables import BATCHES, HEADS, KEYS

RESULTS = Path("results")


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of the rows of tables with so many columns."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    return [row for row in cells if len(row) == columns and not row[0].startswith(("---", "heads", "shape"))]


def test_every_number_of_heads_keys_and_batch_has_a_count_and_sweeps_have_their_costs() -> None:
    page = with_results("<!-- results h200.correction.json -->\nbefore\n<!-- /results -->", RESULTS)
    chosen, measured = rows(page, 2 + len(BATCHES)), rows(page, 10)
    assert len(chosen) == len(HEADS) * len(KEYS)
    assert all(cell.startswith("**") for row in chosen for cell in row[2:])
    counts = {int(row[1]): int(row[2].strip("*").split("*")[0]) for row in chosen if row[0] == "32:8"}
    assert counts[131072] > counts[1024]
    assert len(measured) >= 20
    for row in measured:
        ratios = [float(cell) for cell in row[2:] if cell != "-"]
        assert min(ratios) >= 1.0
