"""`tune lab calibrate` and `tune lab replay --untuned` on sweep files, and the block of the pages."""

import json
from pathlib import Path

import pytest

from blocktune.runtime.selection.correction import DeviceCorrection
from blocktune.tuner.cost.bands import bands_from
from blocktune.tuner.lab.sweep_file import save_sweep
from tests.tuner.lab.test_untuned import H200, LENGTHS, hidden, sweep
from tools.pages.pages import with_results


@pytest.fixture
def places(tmp_path: Path) -> Path:
    folder = tmp_path / "sweeps"
    folder.mkdir()
    for seqlen in LENGTHS[:3]:
        save_sweep(sweep(seqlen, hidden), folder)
    return folder


def test_a_correction_is_made_of_sweeps_and_equal_sweeps_give_equal_bytes(tune, places: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.correction.json", tmp_path / "two.correction.json"
    for out in (one, two):
        result = tune("lab", "calibrate", places, "--out", out)
        assert result.exit_code == 0, result.output
    assert one.read_bytes() == two.read_bytes()
    correction = DeviceCorrection.from_json(json.loads(one.read_text()))
    assert correction.device == H200.key
    assert {measured.shape.seqlen_q for measured in correction.measured} == set(LENGTHS[:3])
    assert "3 measured shapes" in result.stdout
    one, two = tmp_path / "one.bands.json", tmp_path / "two.bands.json"
    assert one.read_bytes() == two.read_bytes()
    assert {band.shapes for band in bands_from(json.loads(one.read_text())).values()} == {3}


def test_untuned_shapes_are_judged_and_shown(tune, places: Path, tmp_path: Path) -> None:
    out = tmp_path / "h200.untuned.json"
    result = tune("lab", "replay", places, "--untuned", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document == json.loads(result.stdout)
    rules = document["left_out"]["shape"]["rules"]
    assert rules["expected"]["mean"] < rules["default"]["mean"]
    assert len(document["left_out"]["family"]["cases"]) == 3
    page = with_results(f"<!-- results {out.name} -->\nthe page of before\n<!-- /results -->", tmp_path)
    assert "| the one decision | the shape | 3 |" in page
    assert "the page of before" not in page
    table = tune("lab", "replay", places, "--untuned").stdout
    assert "the nearest winner" in table
