"""The bench of a worker with a clock that knows all times: who races, who is stopped, and on what terms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from blocktune.db.records.records import Regime
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.measure import clock as clocks
from blocktune.tuner.measure import protocol
from blocktune.tuner.measure.bench import Bench, QuestionCandidate, Questions, WrongResultError
from blocktune.tuner.measure.clock import Clock
from blocktune.tuner.measure.energy import EnergyMeter
from blocktune.tuner.measure.measurement import Measurement, Terms
from blocktune.tuner.measure.protocol import RACE_ROUNDS, Rounds

pytestmark = pytest.mark.triton_free

ANCHOR_US = 1000.0


class Right:
    """A question to which every answer is right."""

    def new_result(self) -> list[float]:
        return []

    def thunk(self, launch: Callable[[], None], out: Any, lse: Any = None) -> Callable[[], None]:
        del out, lse
        return launch

    def poison(self, out: Any) -> None:
        """There is nothing to spoil."""

    def problem(self, out: Any, lse: Any = None) -> str | None:
        del out, lse
        return None


class Launch:
    def __call__(self) -> None:
        """Takes no time here; the clock knows what it would."""


class KnownClock:
    """A GPU whose clock falls by a tenth from round to round; `log` lists the numbers of rounds that were asked for."""

    def __init__(self, times_us: dict[Callable[[], None], float]) -> None:
        self.times_us = times_us
        self.log: list[tuple[int, int]] = []
        self.heated: list[float] = []

    def heat(self, launch: Callable[[], None], seconds: float) -> None:
        launch()
        self.heated.append(seconds)

    def rounds(self, launches: Sequence[Callable[[], None]], count: int) -> Rounds:
        self.log.append((len(launches), count))
        return tuple(tuple(self.times_us[launch] * 1.1**number for launch in launches) for number in range(count))

    def loaded_rounds(self, launches: Sequence[Callable[[], None]], seconds: float) -> Rounds:
        return self.rounds(launches, 1)

    def synchronize(self) -> None:
        """Nothing runs behind."""


def bench_of(
    question: Right, launches: Mapping[KernelConfig, Any], clock: Clock, terms: Terms, meter: EnergyMeter | None = None
) -> Bench:
    """A bench of these configs, checked by one question."""
    questions = Questions.of(question, question)
    return Bench(lambda config: QuestionCandidate(launches[config], questions), clock=clock, terms=terms, meter=meter)


def config(relative: float) -> KernelConfig:
    return KernelConfig("flash_fwd", 16, 16, 4, 2, extra=(("hundredths", round(100 * relative)),))


@pytest.fixture
def measure() -> Callable[..., list[Measurement]]:
    """Measures configs that take so many times as long as the first one, in turn."""

    def measured(*relatives: float, race: bool = True) -> list[Measurement]:
        launches = {config(relative): Launch() for relative in relatives}
        clock = KnownClock(
            {launch: ANCHOR_US * found.parameters["hundredths"] / 100 for found, launch in launches.items()}
        )
        bench = bench_of(Right(), launches, clock, Terms(race=race))
        return [bench.measure(config(relative), lambda stage: None) for relative in relatives]

    return measured


def test_who_is_clearly_slower_than_the_best_so_far_gets_no_more_rounds(
    measure: Callable[..., list[Measurement]],
) -> None:
    anchor, near, far, best, beaten = measure(1.0, 1.14, 1.17, 0.8, 0.93)
    assert [len(found.samples_us) for found in (anchor, near, far, best, beaten)] == [
        25,
        21,
        RACE_ROUNDS,
        30,
        RACE_ROUNDS,
    ]
    assert far.error == "stopped after 2 rounds, 1.17 times the best so far"
    assert beaten.relative_to_anchor == pytest.approx(0.93)
    assert (anchor.error, near.error, best.error) == ("", "", "")


def test_a_sweep_has_no_race(measure: Callable[..., list[Measurement]]) -> None:
    found = measure(1.0, 1.5, 9.0, race=False)
    assert [len(each.samples_us) for each in found] == [25, 16, 5]
    assert {each.error for each in found} == {""}


def test_an_anchor_that_fails_when_it_is_measured_again_is_the_anchor_still() -> None:
    class WrongOnce(Right):
        wrong = False

        def problem(self, out: Any, lse: Any = None) -> str | None:
            del out, lse
            return "relative error 1.0e-01" if self.wrong else None

    launches = {config(relative): Launch() for relative in (1.0, 0.9)}
    clock = KnownClock({launch: ANCHOR_US * found.parameters["hundredths"] / 100 for found, launch in launches.items()})
    question = WrongOnce()
    subject = bench_of(question, launches, clock, Terms())
    subject.measure(config(1.0), lambda stage: None)
    question.wrong = True
    with pytest.raises(WrongResultError):
        subject.measure(config(1.0), lambda stage: None)
    question.wrong = False
    assert subject.measure(config(0.9), lambda stage: None).relative_to_anchor == pytest.approx(0.9)


def test_the_anchor_is_measured_alone_and_never_stopped(measure: Callable[..., list[Measurement]]) -> None:
    *_, again = measure(1.0, 0.5, 1.0)
    assert again.relative_to_anchor == 1.0
    assert len(again.samples_us) == 25


@pytest.mark.parametrize(("regime", "rests"), [(Regime.BURST, True), (Regime.SUSTAINED, False)])
def test_in_bursts_every_round_comes_after_a_rest(monkeypatch: pytest.MonkeyPatch, regime: Regime, rests: bool) -> None:
    slept: list[float] = []
    monkeypatch.setattr(clocks.time, "sleep", slept.append)
    launches = {config(relative): Launch() for relative in (1.0, 1.1)}
    clock = KnownClock(dict.fromkeys(launches.values(), ANCHOR_US))
    subject = bench_of(Right(), launches, clock, Terms(regime=regime))
    rounds = [len(subject.measure(each, lambda stage: None).samples_us) for each in launches]
    rounds.append(len(subject.finals(list(launches), lambda stage: None)[0]))
    assert slept == [protocol.REST_SECONDS] * (sum(rounds) if rests else 0)
    assert clock.heated[-1] == protocol.FINAL_HEAT_SECONDS[regime]
    assert sum(count for contenders, count in clock.log if contenders == 2) == rounds[1] + rounds[2] + 1


def test_terms_survive_their_journey() -> None:
    terms = Terms(seed=7, regime=Regime.BURST, race=False)
    assert Terms.from_json(terms.to_json()) == terms
