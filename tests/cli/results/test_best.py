"""`tune best`: the rungs of the ladder, in JSON and in words."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from blocktune.kernels.values.config import Origin
from blocktune.runtime.selection.correction import shipped_correction

SHAPE = ("best", "--seq", 8192, "--dim", 64, "--device", "h200")


@pytest.fixture(autouse=True)
def _nothing_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results that ship with the package grow; these tests must not change with them."""
    monkeypatch.setattr("blocktune.runtime.store_reader.sources.shipped_rows", lambda: iter(()))
    monkeypatch.setattr("blocktune.cli.shared.lookup.shipped_winners", lambda: iter(()))
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", lambda key: None)


def test_the_json_of_a_measured_winner_holds_the_contract(tune, winner) -> None:
    tune.store(winner())
    result = tune(*SHAPE, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["schema"], data["rung"]) == (1, "exact")
    assert data["best"]["kernel"] == "flash_fwd"
    assert data["best"]["config"] == winner().config.to_json()
    assert (data["best"]["time_us"], data["best"]["origin"]) == (812.5, "measured")
    assert (data["default"]["time_us"], data["default"]["predicted_us"]) == (975.0, None)
    assert (data["shape"]["label"], data["source"]) == ("b2 h32 s8192 d64 bf16", "database")
    assert data["environment"]["driver"] == "580.65.06"


def test_the_words_show_winner_default_paper_and_provenance(tune, winner) -> None:
    tune.store(winner())
    result = tune(*SHAPE, "-v")
    assert result.exit_code == 0
    best = winner()
    for part in (best.config.label, best.default.label, best.paper.label, "975.0 µs", "900.0 µs", "exact", "measured"):
        assert part in result.stdout
    assert "1.200x (1.190 to 1.210)" in result.stdout
    assert "2026-11-20 12:00 UTC, 120 trials, triton 3.6.0" in result.stdout
    assert "assumed --batch 2" in result.stderr


def test_energies_stand_next_to_the_times_where_they_were_measured(tune, winner) -> None:
    tune.store(winner())
    assert "energy" not in tune(*SHAPE, "-v").stdout
    later = winner().created_at + timedelta(minutes=1)
    tune.store(winner(energy_mj=540.5, default_energy_mj=630.25, objective="energy", created_at=later))
    shown = tune(*SHAPE, "-v").stdout
    for part in ("energy", "540.5 mJ", "630.2 mJ", "chosen by energy"):
        assert part in shown
    data = json.loads(tune(*SHAPE, "--json").stdout)
    energies = [data[name]["energy_mj"] for name in ("best", "default", "paper")]
    assert (energies, data["objective"]) == ([540.5, 630.25, None], "energy")


def test_a_default_of_older_kernels_is_not_compared_with(tune, winner) -> None:
    older = replace(winner().default, num_stages=7)
    tune.store(winner(default=older))
    data = json.loads(tune(*SHAPE, "--json").stdout)
    assert (data["default"]["config"], data["default"]["time_us"]) == (winner().default.to_json(), None)
    assert data["speedup_over_default"] is None
    assert "1.200x" not in tune(*SHAPE).stdout
    assert "1.200x" not in tune("list").stdout


def test_a_neighbour_answers_and_says_so(tune, winner) -> None:
    tune.store(winner())
    result = tune("best", "--seq", 4096, "--dim", 64, "--device", "h200", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (data["rung"], data["best"]["origin"]) == ("nearest", "borrowed")
    assert data["tuned_for"]["seqlen_q"] == 8192
    assert data["shape"]["seqlen_q"] == 4096
    assert any("exact" in reason for reason in data["passed_over"])


def test_another_kernel_source_is_borrowed(tune, winner) -> None:
    tune.store(winner(kernel_hash="0123456789abcdef"))
    data = json.loads(tune(*SHAPE, "--json").stdout)
    assert (data["rung"], data["best"]["origin"]) == ("other_source", "borrowed")


def test_a_prediction_is_called_one(tune, winner) -> None:
    tune.store(
        winner(
            origin=Origin.PREDICTED, time_us=None, default_time_us=None, paper_time_us=None, speedup_over_default=None
        )
    )
    data = json.loads(tune(*SHAPE, "--json").stdout)
    assert (data["rung"], data["best"]["origin"], data["best"]["time_us"]) == ("predicted", "predicted", None)
    assert data["best"]["predicted_us"] == 790.0
    assert "790.0 µs" in tune(*SHAPE).stdout


def test_what_is_expected_is_an_answer(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", shipped_correction)
    result = tune("best", "--seq", 5000, "--dim", 64, "--device", "h200", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rung"] == "expected"
    assert "expected to take" in tune("best", "--seq", 5000, "--dim", 64, "--device", "h200").stdout


def test_without_results_it_says_what_would_run_and_how_to_tune(tune) -> None:
    result = tune(*SHAPE, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert (data["rung"], data["best"]["origin"]) == ("default", "default")
    assert not tune.db.exists()
    assert "`tune run --seq 8192 --dim 64 --batch 2 --heads 32 --device h200_sxm`" in tune(*SHAPE).stdout


def test_the_command_that_it_suggests_is_for_the_device_that_was_named(tune) -> None:
    result = tune("best", "--seq", 640, "--dim", 80, "--device", "a100", "--dtype", "fp16", "-v")
    assert result.exit_code == 0
    assert "`tune run --seq 640 --dim 80 --batch 25 --heads 25 --dtype fp16 --device a100_sxm4_80`" in result.stdout


def test_a_shape_that_no_kernel_computes_goes_to_pytorch(tune) -> None:
    result = tune("best", "--seq", 64, "--dim", 1024, "--device", "h200")
    assert result.exit_code == 3
    assert "scaled_dot_product_attention" in result.stdout
