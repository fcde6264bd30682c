"""Ranks warm up together: rank 0 tunes, all take its winners, and nothing is measured any more."""

import json
from typing import Any

import pytest

import blocktune
from blocktune.runtime.api import warm_up
from blocktune.runtime.api.warm_up import tune_at_warmup
from tests.support.suite import warm_python
from tests.support.triton_modes import compiled_here
from tools import program

pytestmark = compiled_here

FIRST, BEST = 128, 256
Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What every rank of every scenario told."""
    command = [*program("ranks.warm_up_ranks"), str(tmp_path_factory.mktemp("ranks"))]
    result = warm_python.run(command, timeout=200)
    assert result.returncode == 0, result.stderr
    found: Told = json.loads(result.stdout)
    return found


def test_rank_0_measures_and_the_others_launch_the_first_config_meanwhile(told: Told) -> None:
    (first, timed), (meanwhile, none) = (rank["warm-up"] for rank in told["two"])
    assert (first, meanwhile, none) == (BEST, FIRST, 0)
    assert timed > 0


@pytest.mark.parametrize("scenario", ["two", "alone"])
def test_then_all_launch_the_winner_and_measure_nothing_new(told: Told, scenario: str) -> None:
    for rank in told[scenario]:
        assert rank["then"] == [BEST, 0]
        assert rank["new"] == [BEST, 0]


def test_a_failure_of_one_rank_is_known_to_all(told: Told) -> None:
    here, there = (rank["error"] for rank in told["a failure"])
    assert "RankError" in here
    assert "failed on rank 1: ValueError: out of pages" in here
    assert there == "ValueError: out of pages"


def test_it_is_a_public_name() -> None:
    assert blocktune.tune_at_warmup is tune_at_warmup


def test_a_rank_tells_its_failure_though_nothing_can_be_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error of CUDA no rank can tell the others anything."""

    def gather(answer: dict[str, Any], group: Any) -> list[dict[str, Any]]:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(warm_up, "gather_answers", gather)
    with pytest.raises(ValueError, match="the real cause"):
        warm_up._require_success(ValueError("the real cause"), None)
    with pytest.raises(RuntimeError, match="closed"):
        warm_up._require_success(None, None)
