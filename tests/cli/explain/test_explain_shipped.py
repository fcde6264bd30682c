"""`tune explain` of what ships: what it says where the model is near a measurement, and where it is far."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from blocktune.kernels.registry import KERNELS
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.occupancy.compiled_code import CompiledCode

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"
H200 = ("--device", "h200")
BACKWARD = ("--seq", 4096, "--batch", 4, "--direction", "backward", "--causal", *H200)
DECODE = ("--seq", 1, "--seq-k", 8192, "--heads", 32, "--kv-heads", 8, "--dim", 128, *H200)
SWEPT = {
    "flash_bwd_hopper": "b4-h16-s1024-d128-bf16-causal-backward",
    "flash_fwd_hopper": "b8-h32-s2048-d64-bf16-causal",
    "flash_decode_hopper": "b64-h32-8-s1-8192-d128-bf16",
}
"""A sweep that every config of a kernel was compiled for."""


@cache
def sweep_of(kernel: str) -> Sweep:
    return load_sweep(SWEEPS / f"h200-{SWEPT[kernel]}.sweep.json.gz")


@pytest.fixture(autouse=True)
def _compiled_when_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resources that the compiler gave the winner's kernel when a shape of its head dimension was swept."""

    def compile_(subject) -> CompiledCode:
        trials = sweep_of(subject.config.kernel).trials
        named = [trial for trial in trials if trial.config == subject.config]
        rest = [trial for trial in trials if trial.config.kernel == subject.config.kernel]
        return CompiledCode(next(trial.resources for trial in (*named, *rest) if trial.resources is not None), None)

    monkeypatch.setattr("blocktune.cli.shared.compiled_config.CompileRequest.compile", compile_)


def explained(tune, *words: object) -> tuple[str, dict]:
    text, document = tune("explain", *words), tune("explain", *words, "--json")
    assert text.exit_code == document.exit_code == 0, text.stderr
    return text.stdout, json.loads(document.stdout)


def test_a_small_call_that_the_model_is_far_from_is_left_unexplained(tune) -> None:
    words = ("--seq", 128, "--batch", 1, "--dim", 64, "--heads", 16, "--causal", *H200)
    text, data = explained(tune, *words)
    assert data["config"]["kernel"] == "flash_fwd_hopper"
    assert data["measured_us"] == pytest.approx(7.9, abs=0.1), "shipped"
    assert abs(data["model_error"]) > 0.25
    assert not data["is_explained"]
    assert data["prediction"]["binding"] is None
    for claim in ("Bound by", "To reduce", "where the time goes", "Exponentials take"):
        assert claim not in text
    for fact in ("The model does not explain this config", "block/SM", "registers/thread", "Matrix products run on"):
        assert fact in text


def test_a_backward_that_the_model_is_near_to_is_explained(tune) -> None:
    text, data = explained(tune, "--dim", 128, "--heads", 16, *BACKWARD)
    assert data["measured_us"] == pytest.approx(1190.4, abs=0.1), "shipped"
    assert data["is_explained"]
    assert "Bound by" in text


@pytest.mark.parametrize("batch", [8, 64])
def test_a_decoding_that_the_model_is_near_to_is_explained_without_a_sum(tune, batch: int) -> None:
    text, data = explained(tune, "--batch", batch, *DECODE)
    assert data["config"]["kernel"] == "flash_decode_hopper"
    assert data["measured_us"] is not None
    assert data["is_explained"]
    table, _ = text.split("\ndevice memory ", 1)
    assert "where the time goes" in table
    assert "%" not in table, "terms overlap: shares of the whole would add up to more than it"
    assert "Bound by" in text


def test_every_term_that_binds_has_its_own_time(tune) -> None:
    text, data = explained(tune, "--batch", 64, *DECODE)
    line = next(line for line in text.splitlines() if "Bound by" in line)
    found = re.findall(r"(\w+) \([^)]*\), alone ([\d,.]+) µs", line)
    assert found
    for term, time_us in found:
        assert float(time_us.replace(",", "")) == pytest.approx(data["prediction"][f"{term}_us"], abs=0.05)


def test_no_shipped_winner_is_advised_to_change_what_its_kernel_lacks(tune) -> None:
    text, data = explained(tune, "--batch", 64, *DECODE)
    own = KERNELS[data["config"]["kernel"]].parameters
    advice = [line for line in text.splitlines() if line.startswith("To reduce")]
    assert advice
    for line in advice:
        assert all(len(own.get(name, ())) > 1 for name in re.findall(r"`(\w+)`", line)), line
