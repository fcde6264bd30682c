"""A file of counters says of which config they are, so that no compile is needed to put predictions next to them."""

import csv
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.profile.comparison import comparison
from blocktune.tuner.profile.counter_file import CounterFile
from blocktune.tuner.profile.counters import TIME, Counters
from tests.support.models.counters import raw_page
from tests.tuner.profile.test_comparison import analysis_of

pytestmark = pytest.mark.triton_free

CSV = raw_page([("made_up_kernel", {TIME: ("us", "500")})])


def test_what_is_written_is_read_with_the_same_predictions(tmp_path: Path) -> None:
    analysis = analysis_of("flash_fwd")
    path = tmp_path / "a.counters.csv"
    path.write_text(CounterFile(analysis, CSV, "2026-11-23").text())
    found = CounterFile.read(path)
    assert (found.analysis.config, found.analysis.shape) == (analysis.config, analysis.shape)
    assert (found.recorded_on, found.analysis.device.uuid) == ("2026-11-23", None)
    assert found.rows() == comparison(analysis, Counters.parse(CSV))
    assert CounterFile.parse(found.text()).text() == found.text()


def test_no_cell_of_strangers_counters_is_a_formula() -> None:
    csv_of_others = raw_page([('=HYPERLINK(""http://x"")', {TIME: ("us", "500"), "a__b": ("-1+cmd", "-5")})])
    text = CounterFile(analysis_of("flash_fwd"), csv_of_others).text()
    cells = [value for row in csv.reader(text.splitlines()[1:]) for value in row]
    assert not [value for value in cells if value.startswith(("=", "+", "@"))]
    assert {"-5", "'-1+cmd"} <= set(cells)
    assert CounterFile.parse(text).counters.total(TIME) == 500


def test_counters_alone_do_not_say_of_what_they_are() -> None:
    with pytest.raises(UsageError, match=r"bare\.csv does not.*--from FILE --out NAME\.counters\.csv"):
        CounterFile.parse(CSV, "bare.csv")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"schema": 1', '"schema": 2'), ('"registers": 168', '"registers": null'), ("flash_fwd", "flash_none"), ("{", "")],
)
def test_another_first_line_is_refused(old: str, new: str) -> None:
    text = CounterFile(analysis_of("flash_fwd"), CSV).text()
    with pytest.raises(UsageError, match="first line"):
        CounterFile.parse(text.replace(old, new, 1))


def test_a_first_line_without_counters_is_refused() -> None:
    head = CounterFile(analysis_of("flash_fwd"), CSV).text().partition("\n")[0]
    with pytest.raises(UsageError, match="no CSV of Nsight Compute"):
        CounterFile.parse(f"{head}\nno counters")
