"""Winners of searches that meet again: who agrees, who is slower, and who does not run any more."""

from collections.abc import Mapping

import pytest

from blocktune.db.records.records import Outcome
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.upkeep.agreement import rematch
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

DEFAULT, BEST, TIED, SLOWER, WORST, BROKEN = landscape.SPACE.feasible[:6]
TIMES_US = {DEFAULT: 100.0, BEST: 90.0, TIED: 90.4, SLOWER: 95.0, WORST: 103.0}


def runner(times_us: Mapping[KernelConfig, float] = TIMES_US) -> ReplayRunner:
    """A GPU that drifts by a tenth over the rounds, alike for all."""
    recorded = {
        config: Measurement(
            outcome=Outcome.OK,
            time_us=time_us,
            relative_to_anchor=time_us / 100,
            samples_us=tuple(time_us * (1 + 0.005 * number) for number in range(21)),
        )
        for config, time_us in times_us.items()
    }
    return ReplayRunner(recorded)


def test_who_found_the_most_frequent_winner_or_one_as_fast_agrees() -> None:
    found = rematch([BEST] * 6 + [TIED] * 3 + [SLOWER], DEFAULT, runner())
    assert (found.searches, found.reference, found.agreeing) == (10, BEST, 9)
    assert found.slower_than_default == 0
    assert found.slowest == pytest.approx(95 / 90)
    data = found.to_json()
    assert [entry["searches"] for entry in data["winners"]] == [6, 3, 1]
    assert data["winners"][0]["over_default"] == pytest.approx(0.9)


def test_of_equally_frequent_winners_the_fastest_leads() -> None:
    assert rematch([SLOWER, BEST], DEFAULT, runner()).reference == BEST


def test_a_winner_that_the_default_beats_is_counted() -> None:
    found = rematch([BEST, BEST, WORST, DEFAULT], DEFAULT, runner())
    assert found.slower_than_default == 1
    assert found.agreeing == 2


def test_a_winner_that_runs_no_more_disagrees_and_the_others_are_timed() -> None:
    found = rematch([BEST, BEST, BROKEN], DEFAULT, runner())
    assert (found.agreeing, found.slower_than_default) == (2, 1)
    assert "was not recorded" in found.to_json()["winners"][1]["problem"]
    with pytest.raises(NoFeasibleConfigError, match="must run"):
        rematch([BROKEN, BROKEN, BEST], DEFAULT, runner())
