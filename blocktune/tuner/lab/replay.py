"""Searches without a GPU: the real search, its compiler and its runner replaced by what a sweep recorded.

run = replay(sweep, "guided", seed=0, measurements=80)
run.regret(20)      # 0.013: the best of 20 measurements is 1.3 % slower than the best of the sweep
run.seconds(20)     # when that was known, by the recorded times of compiling and measuring
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Self

from blocktune.db.records.records import Outcome, Trial
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.base.paper_rule import first_paper_config
from blocktune.kernels.registry import get_kernel, kernels_for
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.candidates.space import SearchSpace
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.measure.measurement import Energies, Finals, Measurement
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.search.loop import Search
from blocktune.tuner.search.report import Limit
from blocktune.tuner.search.run import compiled_ahead
from blocktune.tuner.search.strategies import make_proposals
from blocktune.tuner.subject.attention import AttentionSubject

WORKERS = 15
"""Processes that compile in a replay: 16 processors, one of which is left to the host."""


class ReplayRunner:
    """Answers from recorded measurements; a config that was not recorded is a `run_error`.

    Its finals return the recorded samples, cut to the shortest; `measured` lists the requested configs, in order.
    """

    def __init__(self, recorded: Mapping[KernelConfig, Measurement]):
        self._recorded = dict(recorded)
        self.measured: list[KernelConfig] = []

    @classmethod
    def of_trials(cls, trials: Iterable[Trial]) -> Self:
        """Return a replay of stored trials; the last one of a config counts."""
        return cls({trial.config: Measurement.of_trial(trial) for trial in trials})

    def prepare(self) -> None:
        """Do nothing: no process has to start."""

    def measure(self, config: KernelConfig) -> Measurement:
        self.measured.append(config)
        unrecorded = Measurement(outcome=Outcome.RUN_ERROR, error=f"{config.label} was not recorded")
        return self._recorded.get(config, unrecorded)

    def finals(self, configs: Sequence[KernelConfig]) -> Finals:
        samples = {config: self._recorded[config].samples_us for config in configs}
        rounds = min(map(len, samples.values()), default=0)
        return Finals(samples_us={config: times[:rounds] for config, times in samples.items()})

    def energies(self, configs: Sequence[KernelConfig], rounds: int) -> Energies:
        del configs, rounds
        return Energies()  # no sweep has any

    def confirm(self, config: KernelConfig) -> Measurement:
        return Measurement(outcome=self._recorded[config].outcome)

    def close(self) -> None:
        """Do nothing: no process was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """One search on one sweep.

    slowdowns: after every measurement, the best score so far over the best of the sweep. ends: seconds from the start
    at which it ended, on a machine with `WORKERS` compiling processes and one GPU.
    """

    slowdowns: tuple[float, ...]
    ends: tuple[float, ...]

    def regret(self, measurements: int) -> float:
        """Return how much slower the best of `measurements` measurements is than the sweep's best, as a fraction."""
        return self.slowdowns[min(measurements, len(self.slowdowns)) - 1] - 1

    def seconds_within(self, regret: float) -> float | None:
        """Return the seconds after which the best so far was within this fraction of the sweep's best; None: never."""
        pairs = zip(self.slowdowns, self.ends, strict=True)
        return next((end for slowdown, end in pairs if slowdown <= 1 + regret), None)

    def seconds(self, measurements: int) -> float:
        """Return the seconds after which `measurements` measurements were made."""
        return self.ends[min(measurements, len(self.ends)) - 1]


class Replay:
    """The state that all searches of one sweep share: the space, its scores and the model's opinions, which take a
    while.

    Configs that today's rules refuse are left out, because no search tries them.
    """

    def __init__(self, sweep: Sweep, constants: CostConstants = CONSTANTS) -> None:
        named = dict.fromkeys(trial.config.kernel for trial in sweep.trials)
        self._kernels = {name: get_kernel(name) for name in named}
        limits, shape = sweep.device.limits, sweep.shape
        self._trials = {
            trial.config: trial
            for trial in sweep.trials
            if not self._kernels[trial.config.kernel].omissions(trial.config, shape, limits)
        }
        self.sweep = sweep = replace(sweep, trials=tuple(self._trials.values()))
        self._scores = sweep.scores
        useful = {
            config: usefulness(self._kernels[config.kernel], config, shape, sweep.device) for config in self._trials
        }
        self._predicted = {
            trial.config: predict_us(
                self._kernels[trial.config.kernel], trial.config, shape, sweep.device, code, constants
            )
            for trial in sweep.trials
            if (code := CompiledCode.recorded(trial.resources)) is not None and trial.outcome is not Outcome.INFEASIBLE
        }
        self._subject = _RecordedSubject(
            device=sweep.device,
            environment=sweep.environment,
            shape=shape,
            kernels=self._kernels,
            contenders=_contenders(sweep),
            useful=useful,
            predicted=self._predicted,
        )

    @property
    def serving(self) -> tuple[AttentionKernel, ...]:
        """The swept kernels that serve the shape, the one whose default a call takes first."""
        able = kernels_for(self.sweep.shape, self.sweep.device.limits)
        return tuple(kernel for kernel in able if kernel.name in self._kernels)

    @property
    def predicted(self) -> Mapping[KernelConfig, float]:
        """The model's times in microseconds of all configs that compile and fit."""
        return self._predicted

    def run(self, strategy: str, *, seed: int, measurements: int) -> ReplayRun:
        """Search until `measurements` configs were tried, or all of them."""
        assignment = replace(self._subject.assignment(measurements, seed), first=self._first())
        runner = _ScoredRunner(self._trials.values(), self._scores)
        compiler = _RecordedCompiler(self._trials, runner)
        search = Search(
            self._subject,
            make_proposals(assignment, strategy),
            compiler,
            runner=runner,
            known=(),
            record=lambda trial: None,
            limit=Limit(trials=measurements, seconds=float("inf")),
            lookahead=compiled_ahead(WORKERS),
            on_progress=lambda progress: None,
        )
        search.run()
        best = min(self._scores.values())
        return ReplayRun(
            slowdowns=tuple(score / best for score in _running_minimum(runner.measured, self._scores)),
            ends=_ends(compiler.submitted, runner.measured, self._trials),
        )

    def _first(self) -> tuple[KernelConfig, ...]:
        """Return what a search without neighbours tries first: the default and FlashAttention's heuristic."""
        shape, limits = self.sweep.shape, self.sweep.device.limits
        able = self.serving
        named = [able[0].default_config(shape, limits), first_paper_config(able, shape, limits)] if able else []
        return tuple(config for config in named if config in self._trials)


@dataclass(frozen=True, kw_only=True)
class _RecordedSubject(AttentionSubject):
    """A sweep's shape, with the model's predictions for its configs."""

    useful: Mapping[KernelConfig, float]
    predicted: Mapping[KernelConfig, float]

    def usefulness(self, config: KernelConfig) -> float:
        return self.useful[config]

    def predict(self, compiled: CompileResult[KernelConfig]) -> float | None:
        return self.predicted.get(compiled.config)


def _contenders(sweep: Sweep) -> Contenders:
    """Return the recorded configs as a space, of which the first one stands for the default."""
    configs = tuple(trial.config for trial in sweep.trials)
    space = SearchSpace(shape=sweep.shape, limits=sweep.device.limits, feasible=configs, dropped=(), unsupported={})
    return Contenders(space=space, expected=configs[:1], default=configs[0], paper=None, neighbours=())


class _ScoredRunner(ReplayRunner):
    """A replay that gives every config one score, whichever anchor it was measured against."""

    def __init__(self, trials: Iterable[Trial], scores: Mapping[KernelConfig, float]) -> None:
        super().__init__({})
        scored = [replace(trial, relative_to_anchor=scores.get(trial.config)) for trial in trials]
        self._recorded = ReplayRunner.of_trials(scored)._recorded


class _RecordedCompiler:
    """Has compiled everything before; `submitted` lists each requested config and how many measurements came before."""

    def __init__(self, trials: Mapping[KernelConfig, Trial], runner: ReplayRunner) -> None:
        self._trials = trials
        self._runner = runner
        self.submitted: list[tuple[KernelConfig, int]] = []

    def submit(self, config: KernelConfig) -> "Future[CompileResult]":
        self.submitted.append((config, len(self._runner.measured)))
        trial = self._trials[config]
        outcome = Outcome.OK if trial.resources is not None else trial.outcome
        future: Future[CompileResult] = Future()
        future.set_result(
            CompileResult(
                config=config,
                outcome=outcome,
                resources=trial.resources,
                error=trial.error,
                seconds=trial.compile_seconds,
            )
        )
        return future


def _running_minimum(measured: Iterable[KernelConfig], scores: Mapping[KernelConfig, float]) -> list[float]:
    best, found = float("inf"), []
    for config in measured:
        best = min(best, scores.get(config, float("inf")))
        found.append(best)
    return found


def _ends(
    submitted: Sequence[tuple[KernelConfig, int]],
    measured: Sequence[KernelConfig],
    trials: Mapping[KernelConfig, Trial],
) -> tuple[float, ...]:
    """Return when each measurement ended, in seconds.

    A measurement needs its own compilation and the end of the measurement before. A compilation needs a free process
    and a request by the search, which comes between two measurements.
    """
    idle, compiled, ends, asked = [0.0] * WORKERS, dict[KernelConfig, float](), list[float](), 0
    for count, config in enumerate(measured):
        now = ends[-1] if ends else 0.0
        while asked < len(submitted) and submitted[asked][1] <= count:
            wanted, _ = submitted[asked]
            compiled[wanted] = max(now, heapq.heappop(idle)) + trials[wanted].compile_seconds
            heapq.heappush(idle, compiled[wanted])
            asked += 1
        ends.append(max(now, compiled[config]) + trials[config].bench_seconds)
    return tuple(ends)
