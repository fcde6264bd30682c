"""What a watch says of a measurement: how the GPU worked from its beginning to its end."""

import time
from dataclasses import dataclass

import pytest

from blocktune.db.records.records import Telemetry
from blocktune.tuner.measure import load
from blocktune.tuner.measure.load import POWER_CAP, Watch

pytestmark = pytest.mark.triton_free


@dataclass
class FakeMonitor:
    """A GPU that slows down under its power limit, sample by sample."""

    samples: list[Telemetry]
    energies_j: list[float | None]
    taken: int = 0

    def sample(self) -> Telemetry:
        self.taken += 1
        return self.samples[min(self.taken, len(self.samples)) - 1]

    def energy_j(self) -> float | None:
        return self.energies_j.pop(0)


def state(clock_mhz: int, reasons: int, **changes: int) -> Telemetry:
    return Telemetry(sm_clock_mhz=clock_mhz, throttle_reasons=reasons, **changes)


def watched(monitor: FakeMonitor, samples: int) -> Watch:
    with Watch(monitor, interval_seconds=0.001) as watch:
        while monitor.taken < samples:
            time.sleep(0.001)
    return watch


def test_a_load_has_the_clocks_of_its_whole_length() -> None:
    clocks = [1980, *[1600] * 18, 1560]
    monitor = FakeMonitor(
        [state(clock, POWER_CAP, temperature_c=50 + place) for place, clock in enumerate(clocks)], [None, None]
    )
    found = watched(monitor, 20).load()
    assert found.samples >= 20
    assert found.sm_clock_mhz is not None
    assert (found.sm_clock_mhz[0], found.sm_clock_mhz[2]) == (1560, 1980)
    assert found.temperature_c == 69
    assert found.at_power_limit


@pytest.mark.parametrize(("capped", "held"), [(20, True), (18, True), (17, False), (0, False)])
def test_a_load_is_held_when_the_power_limit_binds_nearly_all_the_while(capped: int, held: bool) -> None:
    monitor = FakeMonitor([state(1600, POWER_CAP)] * capped + [state(1980, 0)] * (20 - capped), [None, None])
    with Watch(monitor, interval_seconds=10.0) as watch:
        watch._samples += [monitor.sample() for _ in range(19)]
    assert watch.load().at_power_limit is held
    assert watch.load().to_json()["at_power_limit"] is held


def test_power_is_energy_over_time_and_unknown_for_what_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    energies: list[float | None] = [1000.0, 1035.0]
    with Watch(FakeMonitor([state(1980, 0)], energies)) as watch:
        time.sleep(0.05)
    with Watch(FakeMonitor([state(1980, 0)], [None, None])) as unknown:
        time.sleep(0.05)
    monkeypatch.setattr(load, "MIN_POWER_SECONDS", 0.02)
    found = watch.load()
    assert found.power_w == pytest.approx(35.0 / found.seconds, rel=0.05)
    assert watch.telemetry().power_w == found.power_w
    assert unknown.load().power_w is None
    monkeypatch.setattr(load, "MIN_POWER_SECONDS", found.seconds + 1)
    assert watch.load().power_w is None


def test_the_samples_of_a_trial_count_as_one() -> None:
    states = [state(1980, 0, other_processes=0), state(1600, POWER_CAP, other_processes=1), state(1500, 8)]
    found = watched(FakeMonitor(states, [None, None]), 3).telemetry()
    assert found.throttle_reasons == POWER_CAP | 8
    assert found.other_processes == 1
    assert found.sm_clock_mhz in (1500, 1550, 1600)  # a median: the thread may have looked once more
    assert found.power_w is None


def test_a_gpu_that_tells_nothing_has_an_unknown_load() -> None:
    with Watch(FakeMonitor([Telemetry()], [None, None])) as watch:
        pass
    assert watch.telemetry() == Telemetry()
    assert watch.load().sm_clock_mhz is None
    assert watch.load().capped is None
    assert not watch.load().at_power_limit
