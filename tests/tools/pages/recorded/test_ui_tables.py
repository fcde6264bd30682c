"""The table of what a reader of the report and of the live page waits for."""

import json
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import UsageError
from tools.pages.pages import with_results
from tools.pages.recorded.ui_tables import FORMAT, NO_BARS, SCHEMA

PAGE = "<!-- results cpu.ui.json -->\n<!-- /results -->"
DOCUMENT = {
    "format": FORMAT,
    "schema": SCHEMA,
    "date": "2026-11-23",
    "cores": 2,
    "load_average": 1.25,
    "python": "3.11.2",
    "rows": [
        {"name": "a page", "bar": "2 s", "value": 1.234, "unit": "s", "cpu_s": 0.5},
        {"name": "a file", "bar": "3 MB", "value": 2.3, "unit": "MB", "cpu_s": None},
    ],
}


def test_every_measurement_is_a_row_next_to_its_bar(tmp_path: Path) -> None:
    (tmp_path / "cpu.ui.json").write_text(json.dumps(DOCUMENT))
    page = with_results(PAGE, tmp_path)
    assert "| a page | 2 s | 1.23 s | 0.5 s |" in page
    assert "| a file | 3 MB | 2.3 MB | - |" in page
    assert "2 CPU cores at a load average of 1.2" in page


def test_without_measurements_the_page_says_how_to_make_them(tmp_path: Path) -> None:
    assert NO_BARS in with_results(PAGE, tmp_path)


def test_another_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu.ui.json").write_text(json.dumps(DOCUMENT | {"format": "another"}))
    with pytest.raises(UsageError, match="has format blocktune-ui"):
        with_results(PAGE, tmp_path)
