"""`tune run --from-misses`: which shapes it takes up, in which order, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Best
from blocktune.kernels.hardware import device
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.miss_file import append_misses
from blocktune.runtime.store_reader.provenance import ptxas_version, triton_version
from blocktune.tuner.candidates.shape_defaults import complete_shape

H200 = device_named("h200")
RARE, FREQUENT, MEASURED = (replace(complete_shape(length, 64), batch=3) for length in (640, 896, 1152))


@pytest.fixture
def misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of misses on the H200."""
    path = tmp_path / "misses.jsonl"
    append_misses(path, {(H200.key, RARE): 2, (H200.key, FREQUENT): 9, (H200.key, MEASURED): 100})
    monkeypatch.setenv("BLOCKTUNE_MISSES", str(path))
    return path


@pytest.fixture
def tuned(winner: Callable[..., Best], monkeypatch: pytest.MonkeyPatch) -> list[AttentionShape]:
    """Return the shapes that the use case was called with; it has no result for `RARE`."""
    got: list[AttentionShape] = []

    def tune(shape: AttentionShape, **_: Any) -> Any:
        got.append(shape)
        raise UsageError("`everything` must fit, but it does not.")

    monkeypatch.setattr("blocktune.tuner.search.tune.tune", tune)
    monkeypatch.setattr(device, "present_devices", tuple)
    return got


def test_the_frequent_come_first_and_none_stops_the_others(tune, misses: Path, tuned: list[AttentionShape]) -> None:
    result = tune("run", "--from-misses", "--device", "h200")
    assert tuned == [MEASURED, FREQUENT, RARE]
    assert "3 shapes to tune" in result.stderr
    assert result.exit_code == 3


def test_what_is_measured_by_now_is_left_out(
    tune, misses: Path, tuned: list[AttentionShape], winner: Callable[..., Best]
) -> None:
    best = winner(shape=MEASURED)
    here = replace(best.environment, triton=triton_version(), ptxas=ptxas_version(90))
    tune.store(replace(best, environment=here))
    tune("run", "--from-misses", "--device", "h200")
    assert tuned == [FREQUENT, RARE]


def test_without_misses_there_is_nothing_to_do(tune, misses: Path, tuned: list[AttentionShape]) -> None:
    result = tune("run", "--from-misses", "--device", "a100", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["runs"] == []
    assert tuned == []


@pytest.mark.parametrize("words", [("--seq", 512, "--dim", 64), ("--causal",), ("--grid", "seq=512 dim=64")])
def test_shapes_come_from_one_place(tune, misses: Path, tuned: list[AttentionShape], words: tuple[object, ...]) -> None:
    result = tune("run", "--from-misses", *words)
    assert result.exit_code == 2
    assert "Leave one out" in result.stderr
    assert tuned == []


def test_misses_that_are_switched_off_are_wrong_use(tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_MISSES", "off")
    result = tune("run", "--from-misses", "--device", "h200")
    assert result.exit_code == 2
    assert "BLOCKTUNE_MISSES" in result.stderr
