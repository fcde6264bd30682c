"""Checks and times configs in this process, which is a worker's: a crash here costs nothing else."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.db.records import Outcome
from blocktune.kernels.config import KernelConfig
from blocktune.kernels.kernel import AttentionKernel, Launch
from blocktune.kernels.shape import AttentionShape
from blocktune.tuner.bench import (
    FINAL_HEAT_SECONDS,
    HEAT_SECONDS,
    IDLE_SECONDS,
    Clock,
    Thunk,
    candidate_rounds,
    column,
    final_rounds,
    median_ratio,
)
from blocktune.tuner.measurement import Measurement
from blocktune.tuner.questions import questions_of

Tell = Callable[[str], None]
"""Tells the parent which stage begins, because each has its own deadline: `running` after the first launch returned,
so that everything is compiled, and `timing` when the timed rounds begin."""


class WrongResultError(Exception):
    """A candidate's output differs from the reference."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The config that every candidate is timed against, and how long it takes."""

    config: KernelConfig
    run: Thunk
    time_us: float


class Bench:
    """Holds the questions with their right answers: `plain` is timed, both are checked.

    The first config that passes becomes the anchor of all later ones, and stays it when it is measured again. `bind`
    makes a launcher of a config.
    """

    def __init__(self, plain: Any, hard: Any, *, clock: Clock, bind: Callable[[Any], Launch]):
        self._clock = clock
        self._bind = bind
        self._plain = plain
        self._hard = hard
        self._out = self._plain.new_result()
        self._anchor_out = self._plain.new_result()
        self._anchor: Anchor | None = None
        self._last_timed = 0.0

    def measure(self, config: KernelConfig, tell: Tell) -> Measurement:
        """Checks the config, times it against the anchor, and checks it again.

        Raises:
            WrongResultError: a result differs from the reference.
            Exception: whatever compiling or running the config raises.
        """
        launch = self._bind(config)
        run = self._plain.thunk(launch, self._out)
        self._verify(launch, self._plain, tell)
        self._verify(launch, self._plain)  # some kernels are right only the first time
        if self._anchor is not None and self._anchor.config == config:
            self._anchor = None  # it is timed alone, as it was before
        samples, relative = self._time(run, tell)
        self._judge(self._plain, "after timing")
        self._verify(launch, self._hard)
        self._verify(launch, self._plain)
        time_us = statistics.median(samples)
        if self._anchor is None:
            self._anchor = Anchor(config, self._plain.thunk(launch, self._anchor_out), time_us)
        return Measurement(outcome=Outcome.OK, time_us=time_us, relative_to_anchor=relative, samples_us=samples)

    def finals(self, configs: Sequence[KernelConfig], tell: Tell) -> list[list[float]]:
        """Times the configs in turns under sustained load: one list of rounds, in microseconds, a config.

        Raises:
            Exception: as `measure`; which config it was is unknown.
        """
        launches = [self._bind(config) for config in configs]
        for launch in launches:
            self._verify(launch, self._plain, tell)
        runs = [self._plain.thunk(launch, self._out) for launch in launches]
        self._clock.heat(runs[0], FINAL_HEAT_SECONDS)
        estimate = self._clock.rounds(runs, 1)[0]
        tell("timing")
        rounds = self._clock.rounds(runs, final_rounds(estimate))
        for launch in launches:
            self._verify(launch, self._plain)
        return [list(column(rounds, index)) for index in range(len(runs))]

    def confirm(self, config: KernelConfig, tell: Tell) -> None:
        """Checks output and log-sum-exp together, which may be another compiled variant than the timed one; a backward
        is checked once more.

        Raises:
            WrongResultError: one of them differs from the reference.
        """
        launch = self._bind(config)
        for question in (self._plain, self._hard):
            self._verify(launch, question, tell, question.new_lse())

    def synchronize(self) -> None:
        """Raises what a launch failed with; if it does after a failure, this process cannot use the GPU any more."""
        self._clock.synchronize()

    def _time(self, run: Thunk, tell: Tell) -> tuple[tuple[float, ...], float]:
        """The config's rounds in microseconds, and its median ratio to the anchor."""
        anchor = self._anchor
        estimate_us = self._clock.rounds([run], 1)[0][0]
        count = candidate_rounds(estimate_us, anchor.time_us if anchor else None)
        if time.monotonic() - self._last_timed > IDLE_SECONDS:
            self._clock.heat(anchor.run if anchor else run, HEAT_SECONDS)
        tell("timing")
        rounds = self._clock.rounds([run, anchor.run] if anchor else [run], count)
        self._last_timed = time.monotonic()
        samples = column(rounds, 0)
        return samples, median_ratio(samples, column(rounds, -1))

    def _verify(self, launch: Launch, question: Any, tell: Tell | None = None, lse: Any | None = None) -> None:
        """Launches once into poisoned memory and compares, so that nothing left by an earlier launch can pass."""
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
        self, shape: AttentionShape, *, device: str, clock: Clock, kernels: Callable[[str], AttentionKernel], seed: int
    ):
        plain, hard = questions_of(shape, device=device, seed=seed)
        super().__init__(plain, hard, clock=clock, bind=lambda config: kernels(config.kernel).bind(config, shape))
