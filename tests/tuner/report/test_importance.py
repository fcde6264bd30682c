"""Which parameters decide, by trials whose times are known to follow one of them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.report import importance
from blocktune.tuner.report.importance import importance_text, kernel_importance, parameter_importance

pytestmark = pytest.mark.triton_free

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"


def made() -> Sweep:
    """A sweep of one kernel whose time is that of its stages alone."""
    whole = load_sweep(SWEEPS / "h200-b2-h32-s8192-d64-bf16.sweep.json.gz")
    timed = [trial for trial in whole.timed.values() if trial.config.kernel == "flash_fwd_hopper"]
    trials = (replace(each, time_us=100.0 * each.config.num_stages, relative_to_anchor=None) for each in timed)
    return replace(whole, trials=tuple(trials))


def test_the_parameter_that_decides_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (importance.MOST, 60):
        monkeypatch.setattr(importance, "MOST", most)
        found = parameter_importance(made())
        assert found[0]["parameter"] == "num_stages"
        assert found[0]["share"] > 0.5
        assert "kernel" not in {each["parameter"] for each in found}, "what all configs share decides nothing"


def test_of_an_autotuned_kernel_too() -> None:
    """With values of several types."""
    configs = [
        LaunchConfig("lib:kernel", (("BLOCK", block), ("EVEN", even), ("num_warps", warps)))
        for block in (32, 64, 128, 256, 512, 1024, 2048)
        for even in (None, True)
        for warps in (1, 2, 4, 8)
    ]
    trials: Any = [SimpleNamespace(config=each, time_us=100.0 * each.parameters["num_warps"]) for each in configs]
    found = kernel_importance([*trials, SimpleNamespace(config=configs[0], time_us=None)])
    assert found[0]["parameter"] == "num_warps"
    assert importance_text(found).startswith("num_warps ")
    assert kernel_importance(trials[: importance.FEWEST - 1]) == []


def test_shares_are_told_in_words() -> None:
    assert (
        importance_text([{"parameter": "BLOCK", "share": 0.61}, {"parameter": "w", "share": 0.3}])
        == "BLOCK 61 %, w 30 %"
    )


def test_a_few_trials_say_nothing() -> None:
    few = replace(made(), trials=made().trials[: importance.FEWEST - 1])
    assert parameter_importance(few) == []
