"""A kernel in one file that nothing else names is searched, explained, counted, exported and on the ladder.

tests/support/toy_kernel.py is all that there is of it.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.cli.main import app
from blocktune.db.exchange.foreign_formats import flex_option
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.registry import register
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.compare.ladder import listed_steps
from blocktune.tuner.compare.ladder_steps import bytes_of
from blocktune.tuner.traffic.model import v2_traffic
from tests.support.command_line import CliRunner, Result
from tests.support.toy_kernel import ToyForward
from tests.support.triton_modes import compiled_here
from tools import ROOT

H200 = device_named("h200")
A100 = device_named("a100")  # the kernels that come first compile faster for it than those for Hopper
SIZES = ("--seq", 1024, "--dim", 64, "--device", "a100")
SHAPE = complete_shape(1024, 64)
BEST = KernelConfig("toy", 128, 64, 4, 2)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with register(ToyForward()):
        yield


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs commands on a database and caches of the test's own, without the results that ship."""
    monkeypatch.setattr("blocktune.runtime.store_reader.sources.shipped_rows", lambda: iter(()))
    monkeypatch.setattr("blocktune.runtime.selection.untuned.shipped_correction", lambda key: None)
    monkeypatch.setattr("blocktune.cli.shared.lookup.shipped_winners", lambda: iter(()))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # the workers import the toy's module
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("BLOCKTUNE_DB", str(tmp_path / "results.db"))

    def run(*words: object) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.stderr
        return result

    return run


@compiled_here
@pytest.mark.slow
def test_the_commands_search_and_explain_it(tune: Any) -> None:
    """What the search has compiled is in the cache when the other commands ask for it."""
    tune("run", *SIZES, "--kernel", "toy", "--trials", 4)
    with ResultStore.open(None) as store:
        trials = [trial for trial in store.trials(A100, SHAPE) if trial.config.kernel == "toy"]
    assert len(trials) >= 2  # the others are the default and FlashAttention's heuristic of the kernels that come first
    assert all(trial.predicted_us and trial.kernel_hash == ToyForward().source_hash for trial in trials)
    explained = json.loads(tune("explain", *SIZES, "--kernel", "toy", "--json").stdout)
    assert explained["prediction"]["total_us"] > 0
    assert explained["tensor_cores"] == "mma"
    assert {tile["name"] for tile in explained["on_chip"]["tiles"]} == {"Q", "K", "V", "S", "P", "O", "m", "l"}
    assert explained["on_chip"]["shared_bytes"] == explained["occupancy"]["resources"]["shared_bytes"]
    assert list(explained["traffic"]) == ["standard", "v1", "v2", "v2_perfect_l2"]
    occupied = json.loads(tune("occupancy", *SIZES, "--kernel", "toy", "--json").stdout)
    assert occupied["blocks_per_sm"] > 1


def test_the_ladder_climbs_it_where_it_is_the_best_that_is_known() -> None:
    steps = {step.name: step for step in listed_steps(SHAPE, H200.limits, [BEST])}
    assert steps["tuned"].config == BEST
    assert steps["v2"].config is not None
    assert steps["v2"].config.kernel == "flash_fwd"
    causal = listed_steps(complete_shape(1024, 64, causal=True), H200.limits, [BEST])
    assert "toy" not in {step.config.kernel for step in causal if step.config}


def test_its_bytes_are_those_of_its_loops() -> None:
    assert bytes_of(SHAPE, BEST).counted == v2_traffic(SHAPE, 128, 64).total_bytes
    assert bytes_of(SHAPE, BEST).least == v2_traffic(SHAPE, 128, 64, perfect_l2=True).total_bytes


def test_flex_attention_takes_its_configs() -> None:
    assert flex_option(BEST) == {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 2}
    assert flex_option(replace(BEST, kernel="flash_fwd_tma"))["fwd_USE_TMA"] is True
