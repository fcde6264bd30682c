"""Checks and times configs in this process, which is a worker's: a crash here costs nothing else."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.base.kernel import AttentionKernel, Launch, Thunk
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.correctness.checks_of_shape import questions_of
from blocktune.tuner.measure.clock import Clock, timed_rounds
from blocktune.tuner.measure.energy import Burst, EnergyMeter
from blocktune.tuner.measure.measurement import Measurement, Terms
from blocktune.tuner.measure.protocol import (
    FINAL_HEAT_SECONDS,
    HEAT_SECONDS,
    IDLE_SECONDS,
    RACE_ROUNDS,
    Rounds,
    candidate_rounds,
    column,
    final_rounds,
    is_behind,
    median_ratio,
    rotated,
)

Tell = Callable[[str], None]
"""Tells the parent which stage begins, because each has its own deadline: `running` after the first launch returned,
so that everything is compiled, `timing` when the timed rounds begin and `checking` when they are over."""


class WrongResultError(Exception):
    """A candidate's output differs from the reference."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The config that every candidate is timed against."""

    config: KernelConfig
    run: Thunk


class Bench:
    """Holds the questions with their right answers: `plain` is timed, both are checked.

    The first config that passes becomes the anchor of all later ones, and stays it when it is measured again. `bind`
    makes a launcher of a config. `meter` measures energies, where the GPU has a counter.
    """

    def __init__(
        self,
        plain: Any,
        hard: Any,
        *,
        clock: Clock,
        bind: Callable[[Any], Launch],
        terms: Terms,
        meter: EnergyMeter | None = None,
    ):
        self._clock = clock
        self._meter = meter
        self._bind = bind
        self._terms = terms
        self._plain = plain
        self._hard = hard
        self._out = self._plain.new_result()
        self._anchor_out = self._plain.new_result()
        self._anchor: Anchor | None = None
        self._best = 1.0  # the lowest ratio to the anchor so far
        self._last_timed = 0.0

    def measure(self, config: KernelConfig, tell: Tell) -> Measurement:
        """Check the config, time it against the anchor, and check it again.

        Raises:
            WrongResultError: a result differs from the reference.
            Exception: whatever compiling or running the config raises.
        """
        launch = self._bind(config)
        run = self._plain.thunk(launch, self._out)
        self._verify(launch, self._plain, tell)
        self._verify(launch, self._plain)  # some kernels are right only the first time
        rival = None if self._anchor is None or self._anchor.config == config else self._anchor
        rounds, remark = self._time(run, rival, tell)
        self._judge(self._plain, "after timing")
        self._verify(launch, self._hard)
        self._verify(launch, self._plain)
        samples, relative = column(rounds, 0), median_ratio(column(rounds, 0), column(rounds, -1))
        if rival is None:
            self._anchor = Anchor(config, self._plain.thunk(launch, self._anchor_out))
        self._best = min(self._best, relative)
        return Measurement(
            outcome=Outcome.OK,
            time_us=statistics.median(samples),
            relative_to_anchor=relative,
            samples_us=samples,
            error=remark,
        )

    def finals(self, configs: Sequence[KernelConfig], tell: Tell) -> list[list[float]]:
        """Time the configs in turns: one list of rounds, in microseconds, a config.

        Raises:
            Exception: as `measure`; which config it was is unknown.
        """
        launches, runs = self._verified(configs, tell)
        regime = self._terms.regime
        self._clock.heat(runs[0], FINAL_HEAT_SECONDS[regime])
        estimate = self._clock.rounds(runs, 1)[0]
        tell("timing")
        rounds = timed_rounds(self._clock, runs, final_rounds(estimate), regime)
        tell("checking")
        for launch in launches:
            self._verify(launch, self._plain)
        return [list(column(rounds, index)) for index in range(len(runs))]

    def energies(self, configs: Sequence[KernelConfig], rounds: int, tell: Tell) -> list[list[Burst]]:
        """Measure a burst of every config in each round, in rotating order: one list of rounds a config, or no list at
        all where the GPU has no counter of its energy.

        Raises:
            Exception: as `measure`; which config it was is unknown.
        """
        if self._meter is None:
            return []
        launches, runs = self._verified(configs, tell)
        times = self._clock.rounds(runs, 1)[0]
        tell("timing")
        found: list[list[Burst]] = [[] for _ in runs]
        for index in (index for number in range(rounds) for index in rotated(len(runs), number)):
            burst = self._meter.burst(runs[index], times[index])
            if burst is None:
                return []
            found[index].append(burst)
        tell("checking")
        for launch in launches:
            self._verify(launch, self._plain)
        return found

    def confirm(self, config: KernelConfig, tell: Tell) -> None:
        """Check output and log-sum-exp together, which may be another compiled variant than the timed one; a backward
        is checked once more.

        Raises:
            WrongResultError: one of them differs from the reference.
        """
        launch = self._bind(config)
        for question in (self._plain, self._hard):
            self._verify(launch, question, tell, question.new_lse())

    def synchronize(self) -> None:
        """Raise what a launch failed with; if it does after a failure, this process cannot use the GPU any more."""
        self._clock.synchronize()

    def _time(self, run: Thunk, anchor: Anchor | None, tell: Tell) -> tuple[Rounds, str]:
        """Return the config's rounds, in microseconds, and why they are fewer than usual, empty where they are not.

        Each round times the config and the anchor; the anchor itself is timed alone.
        """
        count = candidate_rounds(self._clock.rounds([run], 1)[0][0])
        if time.monotonic() - self._last_timed > IDLE_SECONDS:
            self._clock.heat(anchor.run if anchor else run, HEAT_SECONDS)
        tell("timing")
        contenders = [run, anchor.run] if anchor else [run]
        rounds = timed_rounds(self._clock, contenders, RACE_ROUNDS, self._terms.regime)
        score = median_ratio(column(rounds, 0), column(rounds, -1))
        stopped = self._terms.race and anchor is not None and is_behind(score, self._best)
        if not stopped:
            rounds += timed_rounds(self._clock, contenders, count - RACE_ROUNDS, self._terms.regime)
        tell("checking")
        self._last_timed = time.monotonic()
        behind = score / self._best
        return rounds, f"stopped after {RACE_ROUNDS} rounds, {behind:.2f} times the best so far" if stopped else ""

    def _verified(self, configs: Sequence[KernelConfig], tell: Tell) -> tuple[list[Launch], list[Thunk]]:
        """Return the launchers of configs, each of which was right once, and what runs each on the timed question."""
        launches = [self._bind(config) for config in configs]
        for launch in launches:
            self._verify(launch, self._plain, tell)
        return launches, [self._plain.thunk(launch, self._out) for launch in launches]

    def _verify(self, launch: Launch, question: Any, tell: Tell | None = None, lse: Any | None = None) -> None:
        """Launch once into poisoned memory and compare, so that nothing left by an earlier launch can pass."""
        question.poison(self._out)
        question.thunk(launch, self._out, lse)()
        if tell is not None:
            tell("running")
        self._judge(question, "in a single launch", lse)

    def _judge(self, question: Any, when: str, lse: Any | None = None) -> None:
        problem = question.problem(self._out, lse)
        if problem is not None:
            raise WrongResultError(f"{problem} ({when})")


class ShapeBench(Bench):
    """The bench of one shape. `device` is a torch device, `kernels` finds a kernel by name."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        device: str,
        clock: Clock,
        kernels: Callable[[str], AttentionKernel],
        terms: Terms,
        meter: EnergyMeter | None = None,
    ):
        plain, hard = questions_of(shape, device=device, seed=terms.seed)
        super().__init__(
            plain,
            hard,
            clock=clock,
            bind=lambda config: kernels(config.kernel).bind(config, shape),
            terms=terms,
            meter=meter,
        )
