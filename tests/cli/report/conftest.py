"""A report that several tests look at, made once."""

from pathlib import Path

import pytest

from tests.support.pages.reports import DENSE, DOCUMENTS, SYNTHETIC_COUNTERS, WIDE, write_report


@pytest.fixture(scope="session")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two sweeps and one file of every other kind."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(out, DENSE, WIDE, SYNTHETIC_COUNTERS, *DOCUMENTS.values())
