"""`tune devices`: the catalogue and what is here."""

import json
from dataclasses import replace

import pytest

from blocktune.kernels.hardware import device
from blocktune.tuner.measure import telemetry


def test_the_json_lists_present_and_known_devices(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(device.device_named("h200"), uuid="GPU-1", source="driver")
    monkeypatch.setattr(device, "present_devices", lambda: (here,))
    data = json.loads(tune("devices", "--json").stdout)
    assert data["schema"] == 1
    assert data["present"] == [here.to_json()]
    h200 = next(entry for entry in data["catalogue"] if entry["id"] == "h200_sxm")
    assert (h200["cc"], h200["num_sms"], h200["confidence"]) == ("9.0", 132, "D")
    assert h200["source"]


def test_the_table_says_when_no_gpu_is_here(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_devices", tuple)
    result = tune("devices")
    assert result.exit_code == 0
    assert "No GPU or driver in this machine" in result.stderr
    assert "No GPU" not in result.stdout
    assert all(entry.id in result.stdout for entry in device.catalogue())


def test_the_table_shows_the_gpu_that_is_here(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "present_devices", lambda: (replace(device.device_named("a100"), name="[red]A100"),))
    assert "[red]A100" in tune("devices").stdout, "names are text, not markup"


def test_a_gpu_that_cuda_cannot_use_is_shown_as_such(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = replace(device.device_named("a100"), uuid="GPU-2", source="nvml")
    here = replace(device.device_named("h200"), uuid="GPU-1", source="driver")
    monkeypatch.setattr(device, "present_devices", lambda: (here,))
    monkeypatch.setattr(telemetry, "nvml_devices", lambda: (replace(here, source="nvml"), hidden))
    lines = [line for line in tune("devices").stdout.splitlines() if "here" in line or "NVML only" in line]
    assert ["NVIDIA H200" in lines[0], "NVIDIA A100" in lines[1], len(lines)] == [True, True, 2]
