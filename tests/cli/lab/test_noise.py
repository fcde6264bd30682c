"""`tune lab noise`: what it asks of the GPU, and the file that it keeps."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.lab import noise_file
from blocktune.db.records.records import Environment, Regime
from blocktune.kernels.hardware import device as devices
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.lab.noise import study_noise
from tests.tuner.lab.test_noise import FakeGpu, Wall
from tools.pages.recorded import noise_tables

NOISE = ("lab", "noise", "--seq", 8192, "--dim", 64)


def test_without_a_gpu_there_is_nothing_to_study(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "present_devices", tuple)
    assert tune(*NOISE).exit_code == 4


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that is not there; what its runners and the study were given."""
    asked: dict[str, Any] = {"terms": []}
    wall = Wall()

    class Runner(FakeGpu):
        def __init__(self, shape: object, *, terms: Any, **_: Any) -> None:
            super().__init__(terms.regime, wall)
            asked["terms"].append(terms)

        def measure(self, config: Any) -> Any:
            asked.setdefault("configs", []).append(config)
            self._times = dict.fromkeys((*self._times, config), 100.0)
            return super().measure(config)

    device = replace(device_named("h200"), source="driver", uuid=None)
    monkeypatch.setattr("blocktune.kernels.hardware.device.current_device", lambda: device)
    monkeypatch.setattr("blocktune.tuner.measure.runner.GpuRunner", Runner)
    monkeypatch.setattr("blocktune.tuner.lab.noise.study_noise", partial(study_noise, now=wall))
    environment = Environment(triton="3.6.0", ptxas="12.8", torch="2.13", driver="600", power_limit_w=700, protocol=2)
    monkeypatch.setattr("blocktune.tuner.measure.environment.measuring_environment", lambda *_: environment)
    return asked


def test_the_winner_is_studied_in_both_regimes_and_the_file_makes_a_table(
    tune, winner, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune.store(winner())
    file = tmp_path / "h200.noise.json"
    result = tune(*NOISE, "--minutes", 1, "--out", file)
    assert result.exit_code == 0, result.output
    assert [(terms.regime, terms.race) for terms in asked["terms"]] == [
        (Regime.SUSTAINED, False),
        (Regime.BURST, False),
    ]
    assert asked["configs"][0] == winner().config
    assert "equal configs: a winner" in result.stdout
    assert "the tie band is 0.5 %" in result.stdout
    document = json.loads(file.read_text())
    assert document["configs"][0]["label"] == winner().config.label
    assert document["seconds"] <= 60
    block = noise_tables.block(file)
    assert "| sustained |" in block
    assert "| burst |" in block
    assert "triton 3.6.0, torch 2.13, driver 600, power limit 700 W, protocol 2" in block


def test_a_file_that_is_none_is_said(tmp_path: Path) -> None:
    assert noise_tables.block(tmp_path / "a.noise.json") == noise_tables.NO_NOISE
    assert noise_tables.block(tmp_path / "a.rematch.json") == noise_tables.NO_REMATCH
    other = tmp_path / "b.noise.json"
    other.write_text(json.dumps({"format": noise_file.REMATCH_FORMAT, "schema": 1}))
    with pytest.raises(UsageError, match="has format blocktune-noise and schema 1"):
        noise_tables.block(other)
