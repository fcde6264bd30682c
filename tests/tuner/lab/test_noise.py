"""A study of the noise with a GPU and a clock that are made up: what is repeated, for how long, and what is told."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from blocktune.cli.lab.noise_file import noise_cells, noise_notes
from blocktune.db.records.records import Outcome, Regime, Telemetry
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.lab.noise import BLOCK_SECONDS, CONFIGS, Study, near_configs, study_noise
from blocktune.tuner.lab.noise_report import columns, summarize
from blocktune.tuner.measure.measurement import Finals, Measurement
from blocktune.tuner.measure.protocol import TIE_BAND
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

FIRST, SECOND, BROKEN, THIRD, FOURTH, FIFTH = landscape.SPACE.feasible[:6]
SECONDS = {"setup": 8.0, "measure": 0.4, "finals": 4.0, "duel": 1.5}
HOT = {FIRST: 100.0, SECOND: 102.0, THIRD: 104.0, FOURTH: 130.0}
COOL = {FIRST: 90.0, SECOND: 88.0, THIRD: 95.0, FOURTH: 91.0}


class Wall:
    """A clock that only the GPU moves."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.log: list[tuple[str, Regime]] = []

    def __call__(self) -> float:
        return self.at

    def spend(self, what: str, regime: Regime) -> None:
        self.at += SECONDS[what]
        self.log.append((what, regime))


class FakeGpu:
    """A GPU that gets slower with time, and whose measurements and finals are off by up to so much."""

    def __init__(self, regime: Regime, wall: Wall, *, noise: float = 0.01, duel_noise: float = 0.002) -> None:
        self._regime, self._wall, self._noise, self._duel_noise = regime, wall, noise, duel_noise
        self._times = HOT if regime is Regime.SUSTAINED else COOL
        self._random = random.Random(str(regime))

    def prepare(self) -> None:
        self._wall.spend("setup", self._regime)

    def measure(self, config: KernelConfig) -> Measurement:
        self._wall.spend("measure", self._regime)
        if config == BROKEN:
            return Measurement(outcome=Outcome.WRONG_RESULT, error="relative error 1.0e-01")
        warmth = 1 + 0.0002 * (self._wall.at - 1000)
        off = 1 + self._random.uniform(-self._noise, self._noise)
        relative = 1.0 if config == FIRST else self._times[config] / self._times[FIRST] * off
        state = Telemetry(sm_clock_mhz=1600, power_w=699.5, temperature_c=60)
        return Measurement(
            outcome=Outcome.OK,
            time_us=self._times[config] * warmth * off,
            relative_to_anchor=relative,
            telemetry=state,
        )

    def finals(self, configs: Sequence[KernelConfig]) -> Finals:
        self._wall.spend("finals", self._regime)
        return Finals(samples_us={config: (self._times[config],) * 9 for config in configs})

    def duel(self, config: KernelConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        self._wall.spend("duel", self._regime)
        off = 1 + self._random.uniform(-self._duel_noise, self._duel_noise)
        return (self._times[config] * off,) * 41, (self._times[config],) * 41

    def confirm(self, config: KernelConfig) -> Measurement:
        raise AssertionError("nothing is confirmed in a study")

    def close(self) -> None:
        """Nothing was started."""


def study(seconds: float, wall: Wall | None = None, **changes: Any) -> Study:
    wall = wall or Wall()
    gpus = {regime: FakeGpu(regime, wall, **changes) for regime in (Regime.SUSTAINED, Regime.BURST)}
    return study_noise(gpus, (FIRST, SECOND, BROKEN, THIRD, FOURTH, FIFTH), seconds=seconds, now=wall)


@pytest.mark.parametrize("minutes", [1, 3])
def test_a_study_ends_in_time_and_both_regimes_have_the_same_of_it(minutes: int) -> None:
    wall = Wall()
    found = study(60.0 * minutes, wall)
    assert wall.at - 1000 == found.seconds <= 60 * minutes
    assert found.seconds > 60 * minutes - SECONDS["finals"]
    assert found.configs == (FIRST, SECOND, THIRD, FOURTH)  # the one that is wrong has left its place
    turns = [regime for what, regime in wall.log if what == "finals"]
    assert turns == [Regime.SUSTAINED, Regime.BURST] * round(60 * minutes / BLOCK_SECONDS / 2 - 0.5)
    for what in (found.samples, found.duels):
        shares = [sum(each.regime is regime for each in what) for regime in Regime]
        assert min(shares) > 0.8 * max(shares) > 3
    assert {sample.config for sample in found.samples} == set(range(CONFIGS))


def test_what_is_studied_must_run() -> None:
    wall = Wall()
    with pytest.raises(NoFeasibleConfigError, match="its noise cannot be measured"):
        study_noise({Regime.BURST: FakeGpu(Regime.BURST, wall)}, (BROKEN, FIRST), seconds=60.0, now=wall)


def test_spreads_drift_and_order_are_told() -> None:
    summary = summarize(study(180.0))
    hot, cool = summary["regimes"]["sustained"], summary["regimes"]["burst"]
    for regime in (hot, cool):
        assert 0.989 < regime["candidates"]["ratio"]["low"] < 0.995
        assert 1.005 < regime["candidates"]["ratio"]["high"] < 1.011
        assert regime["candidates"]["time"]["high"] > regime["candidates"]["ratio"]["high"]  # drift is in times alone
        assert regime["finals"]["time"] == {"low": 1.0, "high": 1.0}
        assert 1.01 < regime["drift"]["time"] < 1.03
        assert 0.99 < regime["drift"]["ratio"] < 1.01
        assert regime["state"]["candidates"]["power_w"] == [699.5] * 3
        assert regime["state"]["finals"]["power_w"] is None
    assert [place for place, _ in summary["order"]["sustained"]] == [0, 1, 2, 3]
    assert [place for place, _ in summary["order"]["burst"]] == [1, 0, 3, 2]
    assert sorted(map(sorted, summary["swapped"])) == [[0, 1], [2, 3]]


def test_the_tie_band_follows_from_a_config_against_itself() -> None:
    calm = summarize(study(180.0))
    assert 0.0015 < calm["tie_band"] < 0.002 < TIE_BAND
    assert {regime["duels"]["won"] for regime in calm["regimes"].values()} == {0}
    wild = summarize(study(180.0, duel_noise=4 * TIE_BAND))
    assert wild["tie_band"] > 3 * TIE_BAND
    assert all(0.5 < each["duels"]["won"] / each["duels"]["count"] < 1 for each in wild["regimes"].values())


def test_what_is_near_is_what_was_fast_once_each_code_and_else_what_is_alike() -> None:
    trials = [
        landscape.SUBJECT.trial(
            config,
            Outcome.OK,
            time_us=10.0 + place,
            relative_to_anchor=1 + place / 10,
            resources=landscape.resources_of(FIRST if config == THIRD else config),
        )
        for place, config in enumerate((SECOND, THIRD, FIRST, FOURTH))
    ]
    near = near_configs(FIRST, trials, landscape.SPACE.feasible)
    assert near[:3] == (FIRST, SECOND, FOURTH)  # the third is the first's own machine code
    alike = near_configs(FIRST, [], landscape.SPACE.feasible)
    assert alike[0] == FIRST
    own = FIRST.parameters
    assert all(sum(own[name] != value for name, value in each.parameters.items()) == 1 for each in alike[1:])
    assert {each.kernel for each in alike} == {FIRST.kernel}


def test_the_table_has_a_row_a_regime_and_the_columns_are_plain() -> None:
    found = study(60.0)
    document = {
        "summary": summarize(found),
        "configs": [config.to_json() | {"label": config.label} for config in found.configs],
    }
    cells = noise_cells("burst", document["summary"]["regimes"]["burst"])
    assert cells[0] == "burst"
    assert cells[6].startswith("0 of ")
    notes = noise_notes(document)
    assert notes[0].startswith(f"Final times under `burst`, over that of {FIRST.label}: {SECOND.label} 0.978")
    assert f"{FIRST.label} and {SECOND.label}" in notes[2] or f"{SECOND.label} and {FIRST.label}" in notes[2]
    assert "the tie band is 0.5 %" in notes[3]
    samples = columns(found)["samples"]
    assert len(samples["time_us"]) == len(samples["regime"]) == len(found.samples)
    assert dataclasses.asdict(found.samples[0])["config"] == samples["config"][0]
