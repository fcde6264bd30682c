"""`tune lab replay` on sweep files, and the block of the pages that is made of what it keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.lab.sweep_file import save_sweep
from tests.tuner.lab import test_replay as recorded
from tools.pages.pages import NO_REPLAY, with_results


@pytest.fixture
def places(tmp_path: Path) -> Path:
    folder = tmp_path / "sweeps"
    folder.mkdir()
    save_sweep(recorded.sweep(recorded.rough), folder)
    return folder


def test_strategies_are_compared_and_kept(tune, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.tuner.compile_server.farm.default_workers", lambda: 1)
    out = tmp_path / "h200.replay.json"
    words = ("lab", "replay", places, "--strategy", "guided", "--strategy", "random", "--seeds", 2, "--out", out)
    result = tune(*words, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["format"] == "blocktune-replay"
    assert list(report["strategies"]) == ["guided", "random"]
    assert json.loads(out.read_text())["strategies"] == report["strategies"]
    table = tune(*words[:7], "--seeds", 1).stdout
    for part in ("guided", "random", "after 20", "forward, flash_fwd", "rank correlation"):
        assert part in table
    page = with_results(f"<!-- results {out.name} -->\nold\n<!-- /results -->", tmp_path)
    assert "| guided |" in page
    assert "| forward, flash_fwd |" in page
    assert "Random configs are as good" in page
    assert "old" not in page
    assert "| forward, full | `flash_fwd` | 1 |" in page
    fit = with_results(f"<!-- results {out.name}#fit -->\n<!-- /results -->", tmp_path)
    assert "measured / predicted" in fit
    assert "| guided |" not in fit
    part = with_results(f"<!-- results {out.name}#strategies -->\n<!-- /results -->", tmp_path)
    assert part.startswith(f"<!-- results {out.name}#strategies -->\n")
    assert "| guided |" in part
    assert "rank correlation" not in part
    with pytest.raises(UsageError, match="strategies, model, fit, racing"):
        with_results(f"<!-- results {out.name}#weather -->\n<!-- /results -->", tmp_path)


def test_a_long_replay_is_made_in_parts(tune, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.tuner.compile_server.farm.default_workers", lambda: 1)
    out = tmp_path / "h200.replay.json"
    words = ("lab", "replay", places, "--out", out, "--strategy")
    assert tune(*words, "guided", "--strategy", "random", "--seeds", 2).exit_code == 0
    first = json.loads(out.read_text())
    added = tune(*words, "enumeration", "--seeds", 1)
    assert added.exit_code == 0, added.output
    document = json.loads(out.read_text())
    assert {name: row["seeds"] for name, row in document["strategies"].items()} == {
        "enumeration": 1, "guided": 2, "random": 2,
    }  # fmt: skip
    assert document["random_as_good"] == first["random_as_good"]
    (places / "other").mkdir()
    save_sweep(recorded.sweep(), places / "other")
    refused = tune("lab", "replay", places / "other", "--out", out, "--strategy", "model")
    assert refused.exit_code == 2
    assert "of other sweeps" in refused.stderr
    assert json.loads(out.read_text()) == document


def test_a_kernel_can_be_left_out(tune, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.tuner.compile_server.farm.default_workers", lambda: 1)
    other = recorded.get_kernel("flash_fwd_tma")
    both = recorded.sweep()
    turned = [replace(trial, config=replace(trial.config, kernel=other.name)) for trial in both.trials]
    save_sweep(replace(both, trials=(*both.trials, *turned)), places)
    out = tmp_path / "h200-other.replay.json"
    words = ("lab", "replay", places, "--strategy", "model", "--without", "flash_fwd_tma")
    assert tune(*words, "--out", out).exit_code == 0
    document = json.loads(out.read_text())
    assert document["without"] == ["flash_fwd_tma"]
    assert [sweep["configs"] for sweep in document["sweeps"]] == [len(both.trials)]
    assert "without flash_fwd_tma)" in with_results(f"<!-- results {out.name} -->\n<!-- /results -->", tmp_path)
    nothing = tune(*words, "--without", "flash_fwd")
    assert nothing.exit_code == 2
    assert "no times besides those of flash_fwd, flash_fwd_tma" in nothing.stderr
    assert tune("lab", "replay", places, "--without", "flash_fwd_nine").exit_code == 2


def test_wrong_use_is_said(tune, places: Path, tmp_path: Path) -> None:
    unknown = tune("lab", "replay", places, "--strategy", "annealing")
    assert unknown.exit_code == 2
    assert "guided, model" in unknown.stderr
    missing = tune("lab", "replay", tmp_path / "none")
    assert missing.exit_code == 2
    assert "tune lab sweeps" in missing.stderr
    assert tune("lab", "replay", places, "--seeds", 0).exit_code == 2


def test_a_page_says_what_is_missing_and_takes_nothing_else(tmp_path: Path) -> None:
    block = "<!-- results x.replay.json -->\n<!-- /results -->"
    assert NO_REPLAY in with_results(block, tmp_path)
    (tmp_path / "x.replay.json").write_text('{"format": "blocktune-bench", "schema": 1}')
    with pytest.raises(UsageError, match="format blocktune-replay"):
        with_results(block, tmp_path)
    (tmp_path / "x.replay.json").write_text("[")
    with pytest.raises(UsageError, match="is not JSON"):
        with_results(block, tmp_path)
