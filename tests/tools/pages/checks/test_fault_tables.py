"""The table of injected faults."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import UsageError
from tools.pages.checks.fault_tables import NO_FAULTS, block, counts
from tools.pages.pages import with_results
from tools.stores import faults


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch, *parts: str, seed: int = 1) -> None:
    monkeypatch.setattr("sys.argv", ["faults", "--out", str(path), "--seed", str(seed), "--only", *parts])
    for number, key in enumerate(("kills", "commands", "imports")):
        broken = int(key == "commands")
        found = 0, broken, f"note {number}"
        part = replace(faults.PARTS[key], work=lambda folder, tried, seed, found=found: found, count=1000 + number)
        monkeypatch.setitem(faults.PARTS, key, part)
    with pytest.raises(SystemExit) as ended:
        faults.main()
    assert ended.value.code == ("commands" in parts)  # whether something went wrong


def test_what_a_run_writes_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.faults.json"
    recorded(path, monkeypatch, "commands")
    assert re.search(r"\| commands \| 1,001 \| 0 \| 1 \| 20\d\d-\d\d-\d\d.*, seed 1 \| note 1 \|", block(path))
    page = with_results("<!-- results store.faults.json -->\n<!-- /results -->", tmp_path)
    assert "1,001" in page


def test_a_sentence_counts_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.faults.json"
    recorded(path, monkeypatch, "commands", "kills")
    assert "counts 0 lost rows and 1 wrong answers" in counts(path)
    assert counts(path).endswith(": 1,000 killed searches; 1,001 commands.")


def test_a_part_takes_the_place_of_its_earlier_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.faults.json"
    recorded(path, monkeypatch, "imports", "kills", seed=1)
    recorded(path, monkeypatch, "imports", seed=2)
    cases = json.loads(path.read_text())["cases"]
    assert [(case["name"], case["seed"]) for case in cases] == [
        ("killed searches", 1),
        ("changed exports, imported", 2),
    ]
    assert all(case["commit"] == faults.present_commit() for case in cases)


def test_a_part_that_cannot_be_tried_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "missing_part", lambda: "no server")
    assert faults.try_part("stops", 16, 1, "") == "stops: left out: no server"


def test_without_a_record_the_page_says_how_to_make_it(tmp_path: Path) -> None:
    assert block(tmp_path / "store.faults.json") == NO_FAULTS


def test_another_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.faults.json"
    path.write_text(json.dumps({"format": "another", "schema": 1}))
    with pytest.raises(UsageError):
        block(path)
