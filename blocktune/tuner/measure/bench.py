"""Checks and times configs in this process, which is a worker's: a crash here costs nothing else."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self

from blocktune.db.records.records import ConfigT, Outcome
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
    rotated_order,
)

Tell = Callable[[str], None]
"""Tells the parent which stage begins, because each has its own deadline: `running` after the first launch returned,
so that everything is compiled, `timing` when the timed rounds begin and `checking` when they are over."""


class WrongResultError(Exception):
    """A candidate's output differs from the reference."""


class BenchCandidate(Protocol):
    """A config that can be launched, timed and checked.

    run: the launch that is timed. anchor_run: the same in memory of its own, for a config that others are timed
    against.
    """

    @property
    def run(self) -> Thunk: ...

    @property
    def anchor_run(self) -> Thunk: ...

    def check(self, tell: Tell | None = None) -> None:
        """Check a launch on the problem that is timed; raises `WrongResultError`."""

    def check_after_timing(self) -> None:
        """Check what the timed launches left, and launches after them."""

    def confirm(self, tell: Tell) -> None:
        """Check everything that the config can compute."""


@dataclass(frozen=True, slots=True)
class Anchor(Generic[ConfigT]):
    """The config that every candidate is timed against."""

    config: ConfigT
    run: Thunk


class Bench(Generic[ConfigT]):
    """Checks and times the configs of one problem.

    The first config that passes becomes the anchor of all later ones, and stays it when it is measured again.

    Args:
        bind: makes a candidate of a config.
        clock: takes the times.
        terms: on which they are measured.
        meter: measures energies, where the GPU has a counter.
    """

    def __init__(
        self,
        bind: Callable[[ConfigT], BenchCandidate],
        *,
        clock: Clock,
        terms: Terms,
        meter: EnergyMeter | None = None,
    ):
        self._bind = bind
        self._clock = clock
        self._terms = terms
        self._meter = meter
        self._anchor: Anchor[ConfigT] | None = None
        self._best = 1.0  # the lowest ratio to the anchor so far
        self._last_timed = 0.0

    def measure(self, config: ConfigT, tell: Tell) -> Measurement:
        """Check the config, time it against the anchor, and check it again.

        Raises:
            WrongResultError: a result differs from the reference.
            Exception: whatever compiling or running the config raises.
        """
        candidate = self._bind(config)
        candidate.check(tell)
        candidate.check()  # some kernels are right only the first time
        rival = None if self._anchor is None or self._anchor.config == config else self._anchor
        rounds, remark = self._time(candidate.run, rival, tell)
        candidate.check_after_timing()
        samples, relative = column(rounds, 0), median_ratio(column(rounds, 0), column(rounds, -1))
        if rival is None:
            self._anchor = Anchor(config, candidate.anchor_run)
        self._best = min(self._best, relative)
        return Measurement(
            outcome=Outcome.OK,
            time_us=statistics.median(samples),
            relative_to_anchor=relative,
            samples_us=samples,
            error=remark,
        )

    def finals(self, configs: Sequence[ConfigT], tell: Tell) -> list[list[float]]:
        """Time the configs in turns: one list of rounds, in microseconds, a config.

        Raises:
            Exception: as `measure`; which config it was is unknown.
        """
        candidates = self._checked_candidates(configs, tell)
        runs, regime = [each.run for each in candidates], self._terms.regime
        self._clock.heat(runs[0], FINAL_HEAT_SECONDS[regime])
        estimate = self._clock.rounds(runs, 1)[0]
        tell("timing")
        rounds = timed_rounds(self._clock, runs, final_rounds(estimate), regime)
        tell("checking")
        for candidate in candidates:
            candidate.check()
        return [list(column(rounds, index)) for index in range(len(runs))]

    def energies(self, configs: Sequence[ConfigT], rounds: int, tell: Tell) -> list[list[Burst]]:
        """Measure a burst of every config in each round, in rotating order: one list of rounds a config, or no list at
        all where the GPU has no counter of its energy.

        Raises:
            Exception: as `measure`; which config it was is unknown.
        """
        if self._meter is None:
            return []
        candidates = self._checked_candidates(configs, tell)
        runs = [each.run for each in candidates]
        times = self._clock.rounds(runs, 1)[0]
        tell("timing")
        found: list[list[Burst]] = [[] for _ in runs]
        for index in (index for number in range(rounds) for index in rotated_order(len(runs), number)):
            burst = self._meter.burst(runs[index], times[index])
            if burst is None:
                return []
            found[index].append(burst)
        tell("checking")
        for candidate in candidates:
            candidate.check()
        return found

    def confirm(self, config: ConfigT, tell: Tell) -> None:
        """Check everything that a config can compute, without timing it.

        Raises:
            WrongResultError: a result differs from the reference.
        """
        self._bind(config).confirm(tell)

    def synchronize(self) -> None:
        """Raise what a launch failed with; if it does after a failure, this process cannot use the GPU any more."""
        self._clock.synchronize()

    def close(self) -> None:
        """Leave what was measured as it was."""

    def _time(self, run: Thunk, anchor: Anchor[ConfigT] | None, tell: Tell) -> tuple[Rounds, str]:
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

    def _checked_candidates(self, configs: Sequence[ConfigT], tell: Tell) -> list[BenchCandidate]:
        """Return the candidates of configs, each of which was right once."""
        candidates = [self._bind(config) for config in configs]
        for candidate in candidates:
            candidate.check(tell)
        return candidates


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a shape with their right answers, and memory for results.

    plain: is timed. hard: is checked as well. out, anchor_out: results of a candidate and of the anchor.
    """

    plain: Any
    hard: Any
    out: Any
    anchor_out: Any

    @classmethod
    def of(cls, plain: Any, hard: Any) -> Self:
        """Return questions with new memory."""
        return cls(plain, hard, plain.new_result(), plain.new_result())


@dataclass(frozen=True, slots=True)
class QuestionCandidate:
    """An attention kernel's config, checked by the questions of its shape."""

    launch: Launch
    questions: Questions

    @property
    def run(self) -> Thunk:
        return self.questions.plain.thunk(self.launch, self.questions.out)  # type: ignore[no-any-return]

    @property
    def anchor_run(self) -> Thunk:
        return self.questions.plain.thunk(self.launch, self.questions.anchor_out)  # type: ignore[no-any-return]

    def check(self, tell: Tell | None = None) -> None:
        self._verify(self.questions.plain, tell)

    def check_after_timing(self) -> None:
        self._judge(self.questions.plain, "after timing")
        self._verify(self.questions.hard)
        self._verify(self.questions.plain)

    def confirm(self, tell: Tell) -> None:
        """Check output and log-sum-exp together, which may be another compiled variant than the timed one; a backward
        is checked once more.

        Raises:
            WrongResultError: one of them differs from the reference.
        """
        for question in (self.questions.plain, self.questions.hard):
            self._verify(question, tell, question.new_lse())

    def _verify(self, question: Any, tell: Tell | None = None, lse: Any | None = None) -> None:
        """Launch once into poisoned memory and compare, so that nothing left by an earlier launch can pass."""
        question.poison(self.questions.out)
        question.thunk(self.launch, self.questions.out, lse)()
        if tell is not None:
            tell("running")
        self._judge(question, "in a single launch", lse)

    def _judge(self, question: Any, when: str, lse: Any | None = None) -> None:
        problem = question.problem(self.questions.out, lse)
        if problem is not None:
            raise WrongResultError(f"{problem} ({when})")


class ShapeBench(Bench[KernelConfig]):
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
        questions = Questions.of(*questions_of(shape, device=device, seed=terms.seed))
        super().__init__(
            lambda config: QuestionCandidate(kernels(config.kernel).bind(config, shape), questions),
            clock=clock,
            terms=terms,
            meter=meter,
        )
