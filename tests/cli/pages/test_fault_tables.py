"""The table of injected faults."""

import json
from pathlib import Path

import pytest

from blocktune.cli.pages.pages import with_results
from blocktune.cli.pages.recorded.fault_tables import NO_FAULTS, block
from blocktune.kernels.values.errors import UsageError
from tests.support.programs import faults


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.argv", ["faults", "--out", str(folder / "store.faults.json"), "--only", "commands"])
    monkeypatch.setitem(faults.CASES, "commands", (lambda folder, tried, seed: (0, 2, "a note"), 1000))
    with pytest.raises(SystemExit) as ended:
        faults.main()
    assert ended.value.code == 1  # something went wrong
    return folder / "store.faults.json"


def test_what_a_run_writes_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path, monkeypatch)
    assert "| commands | 1,000 | 0 | 2 | a note |" in block(path)
    page = with_results("<!-- results store.faults.json -->\n<!-- /results -->", tmp_path)
    assert "1,000" in page


def test_without_a_record_the_page_says_how_to_make_it(tmp_path: Path) -> None:
    assert block(tmp_path / "store.faults.json") == NO_FAULTS


def test_another_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.faults.json"
    path.write_text(json.dumps({"format": "another", "schema": 1}))
    with pytest.raises(UsageError):
        block(path)
