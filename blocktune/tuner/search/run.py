"""One run: a subject from what the store knows of it, by search and finals, to the stored winner."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeAlias

from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Best, ConfigT, Objective, Outcome, ProblemT, Trial
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.text import counted
from blocktune.runtime.selection.correction import measured_elsewhere
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.compile_server.farm import CompileFarm, default_workers
from blocktune.tuner.cost.bands import band_text
from blocktune.tuner.measure.device_choice import is_present
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.runner import Runner
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.search.finals import Result, hold_finals, interrupted_verdict, rank_trials, require_result
from blocktune.tuner.search.history import Knowledge
from blocktune.tuner.search.loop import Search
from blocktune.tuner.search.proposals import Proposals
from blocktune.tuner.search.report import Limit, OnProgress, Progress, TuningReport, disturbance_notes
from blocktune.tuner.search.verdict import decide_by_predictions
from blocktune.tuner.subject.compiling import PreparingConfigCompiler
from blocktune.tuner.subject.subject import Subject

SPARE_WORKERS = 3
"""Idle processes from which on the launches with log-sum-exp of likely winners are compiled, before the finals say who
won."""

LEAST_AHEAD = 2
"""Compiled configs that wait for the GPU while few processes compile."""

MakeProposals: TypeAlias = Callable[[Subject[ProblemT, ConfigT], Assignment[ConfigT]], Proposals[ConfigT]]


def farm_for(device: DeviceSpec) -> CompileFarm:
    """Return the workers that compile for a run. For a device that is here their code must be at hand, and one
    processor is left to the host, which must stay ahead of the GPU."""
    present = is_present(device)
    return CompileFarm(workers=max(1, default_workers() - present), need_code=present)


def compiled_ahead(workers: int) -> int:
    """Return how many configs may be compiled or compiling ahead of the measuring: enough that no process waits, but
    not all of a search, whose later configs are chosen by what was measured."""
    return workers + max(LEAST_AHEAD, workers // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTools(Generic[ConfigT]):
    """The tools of a run, opened when an earlier run has not answered it.

    open_compiler: compiles ahead. open_runner: measures, or gives None where the model ranks the configs; it takes the
    anchor of earlier sessions, if there is one, and a function that is called before the GPU is waited for.
    """

    open_compiler: Callable[[], AbstractContextManager[PreparingConfigCompiler[ConfigT]]]
    open_runner: Callable[[ConfigT | None, Callable[[str], None]], AbstractContextManager[Runner[ConfigT] | None]]


class Run(Generic[ProblemT, ConfigT]):
    """One subject, with what is known of it.

    Args:
        knowledge: what is tuned, and what earlier runs found out.
        recorder: keeps every trial and the winner.
        terms: how configs are measured.
        make_proposals: the strategy.
        objective: what the finals choose the winner by.
        started: when the run began, by `time.monotonic()`.
    """

    def __init__(
        self,
        knowledge: Knowledge[ProblemT, ConfigT],
        recorder: Recorder,
        terms: Terms,
        make_proposals: MakeProposals[ProblemT, ConfigT],
        objective: Objective,
        started: float,
    ):
        self._knowledge, self._subject = knowledge, knowledge.subject
        self._contenders = knowledge.subject.contenders
        self._recorder = recorder
        self._terms, self._make_proposals = terms, make_proposals
        self._objective = objective
        self._started = started
        self._interrupted = False
        self._stopped_by_machine = False
        self._ended_by = ""

    def execute(self, limit: Limit, on_progress: OnProgress, tools: SearchTools[ConfigT]) -> TuningReport:
        """Search, hold the finals and store the winner; answer from the store where an earlier run has finished.

        Args:
            limit: when the search stops.
            on_progress: called with where the run stands.
            tools: what compiles and measures.
        """
        finished = self._knowledge.finished_best(limit, self._contenders, self._objective)
        if finished is not None:
            return self._report(finished, "found by an earlier run", stored=True, trials=self._knowledge.trials)

        def wait(message: str) -> None:
            on_progress(Progress(phase="wait", done=0, total=0, message=message))

        known = rank_trials(self._knowledge.trials)
        anchor = next((trial.config for trial in known if trial.relative_to_anchor == 1.0), None)
        workers = default_workers()
        with tools.open_compiler() as compiler, tools.open_runner(anchor, wait) as runner:
            if runner is not None:
                runner.prepare()  # all processes start while this one imports torch and orders the space
            compiler.start()
            show = on_progress if runner is None else self._confirming_ahead(on_progress, compiler, workers)
            return self._conclude(self._search(limit, show, compiler, runner, workers), runner, show)

    def _search(
        self,
        limit: Limit,
        on_progress: OnProgress,
        compiler: PreparingConfigCompiler[ConfigT],
        runner: Runner[ConfigT] | None,
        workers: int,
    ) -> Search[ProblemT, ConfigT]:
        subject = self._subject
        return Search(
            subject,
            self._make_proposals(subject, subject.assignment(limit.trials, self._terms.seed)),
            compiler,
            runner=runner,
            known=self._knowledge.trials,
            record=self._recorder.record,
            limit=Limit(trials=limit.trials, seconds=max(1.0, limit.seconds - self._knowledge.spent_seconds)),
            lookahead=compiled_ahead(workers),
            on_progress=on_progress,
        )

    def _conclude(
        self, search: Search[ProblemT, ConfigT], runner: Runner[ConfigT] | None, on_progress: OnProgress
    ) -> TuningReport:
        """Run the search and the finals, and store what is known of them; Ctrl-C ends either with the best so far."""
        try:
            search.run()
            self._ended_by = search.ended_by
            trials = list(search.trials.values())
            require_result(trials, self._subject, search.stopped_by_machine)
            if runner is None:
                return self._predicted_report(trials)
            on_progress(Progress(phase="finals", done=len(trials), total=len(trials)))
            result = hold_finals(runner, trials, self._subject, self._knowledge.incumbent, self._objective)
        except KeyboardInterrupt:
            trials = list(search.trials.values())
            if not any(trial.outcome in (Outcome.OK, Outcome.PREDICTED) for trial in trials):
                raise
            self._interrupted = True
            if runner is None:
                return self._predicted_report(trials)
            result = interrupted_verdict(trials, self._contenders.default)
        self._stopped_by_machine = bool(search.stopped_by_machine) or any(
            failure.transient for failure in result.failures.values()
        )
        for config, failure in result.failures.items():
            failed = self._subject.trial(config, failure.outcome, error=failure.error)
            if not failure.transient:
                self._recorder.record(failed)
            trials = [trial for trial in trials if trial.config != config] + [failed]
        return self._measured_report(trials, result)

    def _confirming_ahead(
        self, show: OnProgress, compiler: PreparingConfigCompiler[ConfigT], workers: int
    ) -> OnProgress:
        """Return a function that shows progress and, as soon as processes have nothing else to compile, has what
        confirms the likely winners compiled: the default and the best so far."""
        default = self._contenders.default
        asked: set[ConfigT] = set()

        def shown(progress: Progress[ConfigT]) -> None:
            if progress.best is not None and progress.compiling < workers - SPARE_WORKERS:
                for config in dict.fromkeys((default, progress.best)):
                    if config not in asked:
                        asked.add(config)
                        compiler.submit_confirmation(config)
            show(progress)

        return shown

    def _measured_report(self, trials: Sequence[Trial[ProblemT, ConfigT]], result: Result[ConfigT]) -> TuningReport:
        for trial in trials:
            if trial.config in result.energies.bursts:
                self._recorder.record(result.with_energy(trial))
        best = dataclasses.replace(
            self._best(result.verdict.winner, Origin.MEASURED, trials),
            **result.columns(self._contenders.default, self._contenders.paper),
        )
        stored = self._may_be_stored() and self._recorder.set_best(best)
        return self._report(best, result.verdict.reason, stored=stored, trials=trials, finals=result.disturbance)

    def _may_be_stored(self) -> bool:
        """Return whether this run's winner may be kept: one that was cut short does not replace a winner of finals."""
        if not self._subject.keeps_partial_winner:
            return not (self._interrupted or self._stopped_by_machine)
        return not self._interrupted or self._knowledge.incumbent is None

    def _predicted_report(self, trials: Sequence[Trial[ProblemT, ConfigT]]) -> TuningReport:
        predicted = {trial.config: trial.predicted_us or 0.0 for trial in trials if trial.outcome is Outcome.PREDICTED}
        subject = self._subject
        expected = subject.expected(predicted)
        winner = expected or decide_by_predictions(predicted, self._contenders.default)
        best = self._best(winner, Origin.PREDICTED, trials)
        other = measured_elsewhere(subject.device.key)
        measured = f"what was measured {f'on another device, {other}' if other else 'for other shapes'}"
        by = "the model" if expected is None else f"the model and {measured}"
        band = band_text(winner.kernel, best.shape, best.device)
        reason = f"first of {counted(len(predicted), 'candidate')} by {by}, {band}; no GPU, so not measured"
        return self._report(best, reason, stored=self._recorder.set_best(best), trials=trials)

    def _best(
        self, winner: ConfigT, origin: Origin, trials: Sequence[Trial[ProblemT, ConfigT]]
    ) -> Best[ProblemT, ConfigT]:
        trial = next(trial for trial in trials if trial.config == winner)
        return self._subject.best(trial, origin, len(trials))

    def _report(
        self,
        best: Best[ProblemT, ConfigT],
        reason: str,
        *,
        stored: bool,
        trials: Sequence[Trial[ProblemT, ConfigT]],
        finals: str = "",
    ) -> TuningReport:
        space = self._contenders.space
        winner = next((trial for trial in trials if trial.config == best.config), None)
        resources = winner.resources if winner else None
        return TuningReport(
            best=best,
            reason=reason,
            occupancy=occupancy(resources, best.device.limits) if resources else None,
            outcomes=Counter(trial.outcome for trial in trials),
            resumed=len(self._knowledge.trials),
            feasible=len(space.feasible),
            dropped=space.dropped_counts,
            unsupported=space.unsupported,
            seconds=time.monotonic() - self._started,
            stored=stored,
            interrupted=self._interrupted,
            ended_by=self._ended_by,
            notes=disturbance_notes(trials, finals),
            predicted_us={trial.config: trial.predicted_us for trial in trials},
        )
