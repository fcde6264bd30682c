"""One run: a shape on a device from what the store knows of it, by search and finals, to the stored winner."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Best, Environment, Objective, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.selection.correction import measured_elsewhere
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.candidates.starting_configs import expected_of_compiled, find_contenders
from blocktune.tuner.compile.background import PreparingCompiler
from blocktune.tuner.compile.farm import CompileFarm, default_workers
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.cost.ranking import usefulness
from blocktune.tuner.cost.roofline import missing_rates
from blocktune.tuner.measure.device_choice import is_present
from blocktune.tuner.measure.environment import measuring_environment, predicting_environment
from blocktune.tuner.measure.locked_runner import gpu_runner
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.runner import GpuRunner, Runner
from blocktune.tuner.measure.telemetry import GpuMonitor
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.search.finals import Result, hold_finals, interrupted_verdict, ranked, require_result
from blocktune.tuner.search.history import Knowledge
from blocktune.tuner.search.loop import Search
from blocktune.tuner.search.proposals import Proposals
from blocktune.tuner.search.report import OnProgress, Progress, TuningReport, disturbance_notes
from blocktune.tuner.search.subject import Limit, Subject
from blocktune.tuner.search.verdict import decide_predicted

SPARE_WORKERS = 3
"""Idle processes from which on the launches with log-sum-exp of likely winners are compiled, before the finals say who
won."""

LEAST_AHEAD = 2
"""Compiled configs that wait for the GPU while few processes compile."""

MakeProposals = Callable[[Subject, Assignment], Proposals]


def farm_for(device: DeviceSpec) -> CompileFarm:
    """Return the workers that compile for a run. For a device that is here their code must be at hand, and one
    processor is left to the host, which must stay ahead of the GPU."""
    present = is_present(device)
    return CompileFarm(workers=max(1, default_workers() - present), need_code=present)


def compiled_ahead(workers: int) -> int:
    """Return how many configs may be compiled or compiling ahead of the measuring: enough that no process waits, but
    not all of a search, whose later configs are chosen by what was measured."""
    return workers + max(LEAST_AHEAD, workers // 2)


class Run:
    """One shape on one device, with the store's knowledge of it.

    Args:
        shape: what is tuned.
        device: where.
        store: what is known, and where other devices' winners are found.
        recorder: keeps every trial and the winner.
        kernels: those to search.
        terms: how configs are measured.
        make_proposals: the strategy.
        objective: what the finals choose the winner by.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: DeviceSpec,
        store: ResultStore,
        recorder: Recorder,
        kernels: Sequence[AttentionKernel],
        terms: Terms,
        make_proposals: MakeProposals,
        objective: Objective,
    ):
        self._started = time.monotonic()
        self._objective = objective
        self._terms, self._make_proposals = terms, make_proposals
        self._present = is_present(device)
        self._recorder = recorder
        self._monitor = GpuMonitor(device.uuid if self._present else None, own_processes=1)
        self._contenders = find_contenders(shape, device, kernels, store.nearest(device, shape))
        named = dict.fromkeys(config.kernel for config in self._contenders.space.feasible)
        self._subject = Subject(
            device=device,
            environment=self._environment(device),
            shape=shape,
            kernels={name: get_kernel(name) for name in named},
        )
        self._knowledge = Knowledge.of(self._subject, store, all_rounds=not terms.race)
        self._interrupted = False
        self._ended_by = ""

    def execute(
        self, limit: Limit, on_progress: OnProgress, compiler: PreparingCompiler | None, runner: Runner | None
    ) -> TuningReport:
        """Search, hold the finals and store the winner; answer from the store where an earlier run has finished.

        Args:
            limit: when the search stops.
            on_progress: called with where the run stands.
            compiler: compiles ahead; None is that of `farm_for`.
            runner: measures; None is one for this shape alone, or the model where the device is not present.
        """
        finished = self._knowledge.finished_best(limit, self._contenders, self._objective)
        if finished is not None:
            return self._report(finished, "found by an earlier run", stored=True, trials=self._knowledge.trials)
        with contextlib.ExitStack() as stack:
            workers = default_workers()
            if compiler is None:
                compiler = stack.enter_context(farm_for(self._subject.device))
            if runner is None and self._present:
                runner = stack.enter_context(self._gpu_runner(on_progress))
            if isinstance(runner, GpuRunner):
                known = ranked(self._knowledge.trials)
                anchor = next((trial.config for trial in known if trial.relative_to_anchor == 1.0), None)
                runner.turn_to(self._subject.shape, anchor, self._terms)
            if runner is not None:
                runner.prepare()  # all processes start while this one imports torch and orders the space
            compiler.start(min(workers, limit.trials))
            if runner is not None:
                on_progress = self._confirming_ahead(on_progress, compiler, workers)
            search = self._search(limit, on_progress, compiler, runner, workers)
            return self._conclude(search, runner, on_progress)

    def _search(
        self, limit: Limit, on_progress: OnProgress, compiler: PreparingCompiler, runner: Runner | None, workers: int
    ) -> Search:
        subject = self._subject
        assignment = Assignment(
            space=self._contenders.space,
            first=self._contenders.first,
            usefulness=lambda config: usefulness(subject.kernels[config.kernel], config, subject.shape, subject.device),
            trials=limit.trials,
            seed=self._terms.seed,
        )
        return Search(
            subject,
            self._make_proposals(subject, assignment),
            compiler,
            runner=runner,
            predict=self._predict,
            known=self._knowledge.trials,
            record=self._recorder.record,
            limit=Limit(trials=limit.trials, seconds=max(1.0, limit.seconds - self._knowledge.spent_seconds)),
            lookahead=compiled_ahead(workers),
            on_progress=on_progress,
        )

    def _predict(self, config: KernelConfig, resources: KernelResources) -> float | None:
        subject = self._subject
        if missing_rates(subject.device):
            return None  # only for a present device: it is measured all the same
        return predict_us(subject.kernels[config.kernel], config, subject.shape, subject.device, resources)

    def _conclude(self, search: Search, runner: Runner | None, on_progress: OnProgress) -> TuningReport:
        """Run the search and the finals, and store what is known of them; Ctrl-C ends either with the best so far."""
        try:
            search.run()
            self._ended_by = search.ended_by
            trials = list(search.trials.values())
            require_result(trials, self._subject.shape, search.stopped_by_machine)
            if runner is None:
                return self._predicted(trials)
            on_progress(Progress(phase="finals", done=len(trials), total=len(trials)))
            result = hold_finals(runner, trials, self._contenders, self._knowledge.incumbent, self._objective)
        except KeyboardInterrupt:
            trials = list(search.trials.values())
            if not any(trial.outcome in (Outcome.OK, Outcome.PREDICTED) for trial in trials):
                raise
            self._interrupted = True
            if runner is None:
                return self._predicted(trials)
            result = interrupted_verdict(trials, self._contenders.default)
        for config, failure in result.failures.items():
            failed = self._subject.trial(config, failure.outcome, error=failure.error)
            if not failure.transient:
                self._recorder.record(failed)
            trials = [trial for trial in trials if trial.config != config] + [failed]
        return self._measured(trials, result)

    def _confirming_ahead(self, show: OnProgress, compiler: PreparingCompiler, workers: int) -> OnProgress:
        """Return a function that shows progress and, as soon as processes have nothing else to compile, has what
        confirms the likely winners compiled: the default and the best so far."""
        subject, default = self._subject, self._contenders.default
        asked: set[KernelConfig] = set()

        def shown(progress: Progress) -> None:
            if progress.best is not None and progress.compiling < workers - SPARE_WORKERS:
                for config in dict.fromkeys((default, progress.best)):
                    if config not in asked:
                        asked.add(config)
                        compiler.submit_with_lse(config.kernel, config, subject.shape, subject.device.limits.cc)
            show(progress)

        return shown

    def _measured(self, trials: Sequence[Trial], result: Result) -> TuningReport:
        for trial in trials:
            if trial.config in result.energies.bursts:
                self._recorder.record(result.with_energy(trial))
        best = dataclasses.replace(
            self._best(result.verdict.winner, Origin.MEASURED, trials),
            **result.columns(self._contenders.default, self._contenders.paper),
        )
        # A run that was cut short does not replace a winner that won finals.
        stored = (not self._interrupted or self._knowledge.incumbent is None) and self._recorder.set_best(best)
        return self._report(best, result.verdict.reason, stored=stored, trials=trials, finals=result.disturbance)

    def _predicted(self, trials: Sequence[Trial]) -> TuningReport:
        predicted = {trial.config: trial.predicted_us or 0.0 for trial in trials if trial.outcome is Outcome.PREDICTED}
        subject, contenders = self._subject, self._contenders
        expected = expected_of_compiled(predicted, subject.shape, subject.device, contenders.near)
        winner = expected or decide_predicted(predicted, contenders.default)
        best = self._best(winner, Origin.PREDICTED, trials)
        other = measured_elsewhere(subject.device.key)
        measured = f"what was measured {f'on another device, {other}' if other else 'for other shapes'}"
        by = "the model" if expected is None else f"the model and {measured}"
        reason = f"the fastest of {len(predicted)} by {by}; nothing was measured"
        return self._report(best, reason, stored=self._recorder.set_best(best), trials=trials)

    def _best(self, winner: KernelConfig, origin: Origin, trials: Sequence[Trial]) -> Best:
        subject = self._subject
        trial = next(trial for trial in trials if trial.config == winner)
        return Best(
            device=subject.device,
            environment=subject.environment,
            shape=subject.shape,
            config=winner,
            kernel_hash=trial.kernel_hash,
            origin=origin,
            predicted_us=trial.predicted_us,
            default=self._contenders.default,
            paper=self._contenders.paper,
            trials=len(trials),
        )

    def _report(
        self, best: Best, reason: str, *, stored: bool, trials: Sequence[Trial], finals: str = ""
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

    def _environment(self, device: DeviceSpec) -> Environment:
        if not self._present:
            return predicting_environment(device)
        return measuring_environment(device, self._monitor, self._terms.regime)

    def _gpu_runner(self, on_progress: OnProgress) -> AbstractContextManager[GpuRunner]:
        """Return a runner for this shape alone."""

        def wait(message: str) -> None:
            on_progress(Progress(phase="wait", done=0, total=0, message=message))

        subject = self._subject
        return gpu_runner(subject.shape, subject.device, self._monitor, wait, self._terms)
