"""What two devices lose by one another's winners and measurements, and the tables of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.hardware.device import DeviceSpec, device_named
from blocktune.tuner.cost.constants import CONSTANTS
from blocktune.tuner.cost.estimated_resources import estimated_resources
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.lab.untuned import UntunedStudy
from tests.support.stores.sample_records import winner
from tests.tuner.lab.test_untuned import KERNEL, LENGTHS, hidden, shape_of, sweep
from tools.lab import transfer, transfer_file
from tools.lab.transfer_losses import decisions, model_slowdown, shared_shapes
from tools.pages.pages import with_results

H100, H200 = device_named("h100"), device_named("h200")
SHARED, ALONE, LOST = (dataclasses.replace(winner(), shape=shape_of(length)) for length in LENGTHS[:3])
OTHER = dataclasses.replace(SHARED.config, num_stages=SHARED.config.num_stages + 1)


def on(device: DeviceSpec, one: Sweep) -> Sweep:
    """A sweep as of another device, with resources as they are estimated."""
    trials = tuple(
        dataclasses.replace(
            trial, device=device, resources=estimated_resources(KERNEL, trial.config, one.shape, device)
        )
        for trial in one.trials
    )
    return dataclasses.replace(one, device=device, trials=trials)


def test_equal_winners_need_no_meeting_and_others_have_a_ratio_only_where_they_met() -> None:
    there = [SHARED, dataclasses.replace(ALONE, config=OTHER), dataclasses.replace(LOST, config=OTHER)]
    rounds = {ALONE.shape.label: {ALONE.config: 0.9, OTHER: 0.99}}
    found = {one.shape: one.slowdown for one in shared_shapes([SHARED, ALONE, LOST], there, rounds)}
    assert found == {SHARED.shape: 1.0, ALONE.shape: pytest.approx(1.1), LOST.shape: None}


def test_the_default_met_the_winner_in_the_finals_of_its_search() -> None:
    assert SHARED.default is None
    own = dataclasses.replace(SHARED, config=OTHER, default=SHARED.config, speedup_over_default=1.05)
    (found,) = shared_shapes([own], [SHARED], {})
    assert found.slowdown == 1.05


def test_a_decision_by_another_device_knows_what_was_measured_there_and_not_the_shape() -> None:
    here = [on(H100, sweep(length, hidden)) for length in LENGTHS]
    knowing = UntunedStudy([sweep(length, hidden) for length in LENGTHS])
    ignorant = UntunedStudy([sweep(length) for length in LENGTHS[:1]])
    study = UntunedStudy(here)
    for case in decisions(study, knowing, here, {"h200": CONSTANTS}):
        assert (case.own, case.other) == (1.0, 1.0)
        assert case.default >= 1 / 0.91
        assert case.model["h200"] >= 1.0
    assert max(case.other for case in decisions(study, ignorant, here, {})) > 1.0


def test_the_model_alone_takes_its_favourite() -> None:
    assert model_slowdown(on(H200, sweep(4096)), CONSTANTS) == pytest.approx(1.0, abs=0.02)


def way(device: str, other: str, slowdowns: list[float | None]) -> dict[str, Any]:
    config = SHARED.config.to_json()
    return {
        "device": device,
        "other": other,
        "winners": [
            {
                "shape": {"label": f"s{number}"},
                "family": "backward",
                "own": config,
                "other": config if slowdown == 1.0 else OTHER.to_json(),
                "slowdown": slowdown,
            }
            for number, slowdown in enumerate(slowdowns)
        ],
        "decisions": [
            {"family": "decoding", "own": 1.0, "other": 1.21, "default": 1.1, "model": {"h200": 1.0, "h100": 1.44}}
        ],
    }


def test_the_tables_tell_both_ways_and_where_tuning_again_pays(tmp_path: Path) -> None:
    ways = [way("h100", "h200", [1.0, 1.21, None]), way("h200", "h100", [1.0])]
    document = {"format": transfer_file.FORMAT, "schema": transfer_file.SCHEMA, "ways": ways}
    (tmp_path / "h100-h200.transfer.json").write_text(json.dumps(document))
    page = with_results("<!-- results h100-h200.transfer.json -->\n<!-- /results -->", tmp_path)
    assert "| h100 | h200 | backward | 3 | 1 | 1 | 1.100 | 1.210 | 1 | 1 | 1 |" in page
    assert "On the h100 its own winner is more than 2 % faster than the h200's on 1 of 2 shapes: s1 1.210." in page
    assert "On the h200 its own winner is more than 2 % faster than the h100's on 0 of 1 shapes." in page
    assert "| h100 | the one decision, by those of the h200 | 1 | 1.210 | 1.210 | 1.210 | 1.210 (1) |" in page
    assert "| h200 | the model alone, fitted to the h100 | 1 | 1.440 | 1.440 | 1.440 | 1.440 (1) |" in page


def test_without_a_file_the_page_says_how_it_would_come_about(tmp_path: Path) -> None:
    page = with_results("<!-- results h100-h200.transfer.json -->\n<!-- /results -->", tmp_path)
    assert "python -m tools.lab.transfer" in page


def test_a_rematch_is_read_by_config_if_there_was_one(tmp_path: Path) -> None:
    file = tmp_path / "h100-elsewhere.rematch.json"
    assert transfer.rematch_ratios(file) == {}
    entry = {"config": SHARED.config.to_json(), "over_default": 0.9}
    broken = {"config": OTHER.to_json(), "over_default": None}
    rows = [{"label": "s", "winners": [entry, broken]}]
    file.write_text(json.dumps({"format": "blocktune-rematch", "schema": 1, "rows": rows}))
    assert transfer.rematch_ratios(file) == {"s": {SHARED.config: 0.9}}
