"""The search: compile ahead, measure what is ready, learn, and keep every trial the moment it ends."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Generic

from blocktune.db.records.records import ConfigT, Outcome, ProblemT, Trial
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.measure.runner import Runner
from blocktune.tuner.sampling.trial_facts import score_of
from blocktune.tuner.search.proposals import Proposals
from blocktune.tuner.search.report import Limit, OnProgress, Progress
from blocktune.tuner.subject.compiling import ConfigCompiler
from blocktune.tuner.subject.subject import Subject

TICK_SECONDS = 0.5
"""How often progress is reported while nothing happens."""

PACE_TRIALS = 3
"""Trials before the time left is estimated: the first ones wait for processes that start."""


@dataclass(frozen=True, slots=True)
class _Ready(Generic[ConfigT]):
    """A compiled config that waits for the GPU."""

    config: ConfigT
    resources: KernelResources
    compile_seconds: float
    predicted_us: float | None


class Search(Generic[ProblemT, ConfigT]):
    """Tries proposals until the limit. `trials` holds how each ended, earlier runs' included; `stopped_by_machine`
    names those that failed by the machine, such as by a full disk, which no store keeps.

    Args:
        subject: what is tuned, with the model that predicts.
        proposals: what to try.
        compiler: compiles ahead of the measuring.
        runner: measures; None ranks by the model alone and calls the outcome `predicted`.
        known: trials of earlier runs that need not be made again.
        record: keeps a trial; it returns when the trial is safe.
        limit: when to stop.
        lookahead: configs that may be compiled or compiling ahead of the measuring.
        on_progress: called with the progress after every event and twice per second.
    """

    def __init__(
        self,
        subject: Subject[ProblemT, ConfigT],
        proposals: Proposals[ConfigT],
        compiler: ConfigCompiler[ConfigT],
        *,
        runner: Runner[ConfigT] | None,
        known: Sequence[Trial[ProblemT, ConfigT]],
        record: Callable[[Trial[ProblemT, ConfigT]], None],
        limit: Limit,
        lookahead: int,
        on_progress: OnProgress,
    ):
        self.trials = {trial.config: trial for trial in known}
        self.stopped_by_machine: set[ConfigT] = set()
        self._subject = subject
        self._proposals = proposals
        self._compiler = compiler
        self._runner = runner
        self._record = record
        self._limit = limit
        self._lookahead = lookahead
        self._on_progress = on_progress
        self._resumed = len(known)
        self._rank: dict[ConfigT, int] = {}  # in the order of the proposals
        self._in_flight: dict[Future[CompileResult[ConfigT]], ConfigT] = {}
        self._ready: list[_Ready[ConfigT]] = []
        self._started = time.monotonic()
        self._since: float | None = None
        self._last = self._started
        self._promised = math.inf  # when the search ends by the earliest estimate so far
        for trial in known:
            proposals.recall(trial.config, score_of(trial), trial)

    @property
    def ended_by(self) -> str:
        """The bound that has ended the search, `trials` or `seconds`; empty where nothing was left to try."""
        if len(self.trials) >= self._proposals.size:
            return ""
        if self._is_over():
            return "seconds"
        return "trials" if len(self.trials) >= self._limit.trials else ""

    def run(self) -> None:
        """Search until the limit or until nothing is left to try.

        Raises:
            KeyboardInterrupt: as always; `trials` is complete up to then.
            BlocktuneError: the GPU worker cannot be started, or the store does not take a trial.
        """
        self._started = time.monotonic()
        if self._runner is not None:
            self._runner.prepare()
        try:
            while not self._is_over():
                self._fill()
                self._collect()
                if self._ready and not self._awaits_the_first():
                    self._finish(self._take())
                elif self._in_flight:
                    wait(self._in_flight, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
                else:
                    break
                self._tell_progress()
        finally:
            for future in self._in_flight:
                future.cancel()
            self._proposals.close()

    def _is_over(self) -> bool:
        """Return whether the time is up. It counts from the first trial on: until then the GPU worker starts and the
        default is compiled."""
        return self._seconds_left() < 0

    def _seconds_left(self) -> float:
        searched = 0.0 if self._since is None else time.monotonic() - self._since
        return self._limit.seconds - searched

    def _fill(self) -> None:
        """Keep the compiler ahead."""
        while (
            len(self._in_flight) + len(self._ready) < self._lookahead
            and self._resumed + len(self._rank) < self._limit.trials
        ):
            config = self._proposals.propose()
            if config is None:
                return
            self._rank[config] = len(self._rank)
            self._in_flight[self._compiler.submit(config)] = config

    def _collect(self) -> None:
        """Take what has been compiled: it waits for the GPU, or it cannot run."""
        for future in [future for future in self._in_flight if future.done()]:
            config = self._in_flight.pop(future)
            result = future.result()
            seconds = 0.0 if result.cached else result.seconds
            if result.resources is None:
                failed = self._trial(config, result.outcome, error=result.error, compile_seconds=seconds)
                self._keep(failed, stored=not result.transient)
                continue
            found = self._subject.occupancy(result.resources)
            error = self._subject.obstacle(config, found)
            if error is not None:
                fields = {
                    "resources": result.resources,
                    "blocks_per_sm": found.blocks_per_sm,
                    "occupancy": found.fraction,
                }
                self._keep(self._trial(config, Outcome.INFEASIBLE, error=error, compile_seconds=seconds, **fields))
                continue
            predicted_us = self._subject.predict(result)
            self._ready.append(_Ready(config, result.resources, seconds, predicted_us))

    def _awaits_the_first(self) -> bool:
        """Return whether the first proposal still compiles. It is the default, the anchor of all others, so they
        wait."""
        return any(self._rank[config] == 0 for config in self._in_flight.values())

    def _take(self) -> _Ready[ConfigT]:
        """Return the config that the strategy picks among those that are ready; the first proposal before all
        others."""
        waiting = {ready.config: ready for ready in sorted(self._ready, key=lambda ready: self._rank[ready.config])}
        first = next(iter(waiting))
        if self._rank[first] > 0:
            first = self._proposals.pick({config: ready.predicted_us for config, ready in waiting.items()})
        self._ready.remove(waiting[first])
        return waiting[first]

    def _finish(self, ready: _Ready[ConfigT]) -> None:
        """Measure a compiled config and keep the trial."""
        found = self._subject.occupancy(ready.resources)
        compiled: dict[str, Any] = {
            "resources": ready.resources,
            "blocks_per_sm": found.blocks_per_sm,
            "occupancy": found.fraction,
            "limiters": tuple(str(limiter) for limiter in found.limiters),
            "predicted_us": ready.predicted_us,
            "compile_seconds": ready.compile_seconds,
        }
        twin = self._twin(ready)
        if twin is not None:
            remark = f"same machine code as {twin.config.label}; measured once"
            measured = dataclasses.replace(Measurement.of_trial(twin), error=remark, seconds=0.0)
            self._keep(self._trial(ready.config, **compiled, **measured.trial_values()))
        elif self._runner is None:
            self._keep(self._trial(ready.config, Outcome.PREDICTED, **compiled))
        else:
            self._tell_progress(measuring=ready.config)
            measurement = self._runner.measure(ready.config)
            trial = self._trial(ready.config, **compiled, **measurement.trial_values())
            self._keep(trial, stored=not measurement.transient)

    def _twin(self, ready: _Ready[ConfigT]) -> Trial[ProblemT, ConfigT] | None:
        """Return a measured config with the same machine code, which is launched in the same way."""
        if self._runner is None:
            return None
        timed = (trial for trial in self.trials.values() if trial.outcome is Outcome.OK)
        twins = (
            trial
            for trial in timed
            if self._subject.are_twins(ready.config, ready.resources, trial.config, trial.resources)
        )
        return next(twins, None)

    def _keep(self, trial: Trial[ProblemT, ConfigT], *, stored: bool = True) -> None:
        """Take a trial into account; one that is not stored is tried again by the next run."""
        if stored:
            self._record(trial)
        else:
            self.stopped_by_machine.add(trial.config)
        self._last = time.monotonic()
        if self._since is None:
            self._since = self._last
        self.trials[trial.config] = trial
        self._proposals.tell(trial.config, score_of(trial), trial)

    def _trial(self, config: ConfigT, outcome: Outcome, **fields: object) -> Trial[ProblemT, ConfigT]:
        return self._subject.trial(config, outcome, **fields)

    def _tell_progress(self, measuring: ConfigT | None = None) -> None:
        best = min(
            (trial for trial in self.trials.values() if score_of(trial) is not None),
            key=lambda trial: score_of(trial) or 0.0,
            default=None,
        )
        total = min(self._limit.trials, max(len(self.trials), self._proposals.size))
        self._on_progress(
            Progress(
                phase="search" if self._runner is not None else "compile",
                done=len(self.trials),
                total=total,
                compiled=len(self._ready),
                compiling=len(self._in_flight),
                outcomes=Counter(trial.outcome for trial in self.trials.values()),
                best=best.config if best else None,
                best_us=(best.time_us or best.predicted_us) if best else None,
                elapsed_seconds=time.monotonic() - self._started,
                eta_seconds=self._time_left(total),
                measuring=measuring,
            )
        )

    def _time_left(self, total: int) -> float | None:
        """Return the seconds until the end by the pace so far; None before a pace is known, and when the end is later
        than that. It never counts up, since the earliest end of all estimates is kept."""
        fresh, now = len(self.trials) - self._resumed, time.monotonic()
        if fresh < PACE_TRIALS:
            return None
        pace = (self._last - self._started) / fresh
        ends = self._last + (total - len(self.trials)) * pace
        self._promised = min(self._promised, ends, now + self._seconds_left())
        return self._promised - now if self._promised > now else None
