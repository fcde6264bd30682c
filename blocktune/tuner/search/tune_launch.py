"""The use case: tune one call of an autotuned kernel on its own arguments, by the search that tunes a shape."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Objective
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import KernelProblem, LaunchConfig
from blocktune.runtime.autotuned.settings import brings_its_own_bench
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.launches.launch_runner import LaunchMachine, LaunchRunner
from blocktune.tuner.measure.environment import measuring_environment
from blocktune.tuner.measure.locked_runner import locked
from blocktune.tuner.measure.telemetry import GpuMonitor, require_energy
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.history import Knowledge
from blocktune.tuner.search.kept_study import kept_proposals
from blocktune.tuner.search.neighbourhood import Neighbourhood
from blocktune.tuner.search.proposals import Proposals
from blocktune.tuner.search.report import Limit, OnProgress, TuningReport
from blocktune.tuner.search.run import Run, SearchTools
from blocktune.tuner.search.strategies import require_strategy
from blocktune.tuner.subject.costs import rates_of
from blocktune.tuner.subject.launch import LaunchSubject
from blocktune.tuner.subject.launch_compiler import LaunchCompiler

logger = logging.getLogger("blocktune")

_UNBOUNDED = 1 << 30

_PROCESSES = 2
"""On the GPU while a call is measured: many libraries look at it when they are imported, as in the process that
compiles."""


def launch_machine() -> LaunchMachine:
    """Return what this process compiles and measures with."""
    return LaunchMachine()


def tune_launch(
    call: AutotunedCall,
    device: DeviceSpec,
    store: ResultStore,
    options: SearchOptions,
    on_progress: OnProgress = lambda progress: None,
    machine: LaunchMachine | None = None,
    *,
    afresh: bool = False,
) -> TuningReport:
    """Find the best config of a call, store it and every trial, and report. The whole list is tried unless the budget
    is bounded.

    Args:
        call: a launch with its arguments.
        device: the GPU that is here.
        store: where results are kept.
        options: how the search goes.
        on_progress: called with where the run stands, several times per second at most.
        machine: what compiles and measures; None is `launch_machine()`.
        afresh: measure what was measured before, too.

    Raises:
        UsageError: an argument cannot be restored, or the GPU does not tell its energy.
        NoFeasibleConfigError: no config compiles and computes what the first one does.
        KeyboardInterrupt: interrupted before anything was found; trials are kept.
    """
    require_strategy(options.sampler)
    if options.objective is Objective.ENERGY:
        require_energy(device)
    started, machine = time.monotonic(), machine or launch_machine()
    monitor = GpuMonitor(device.uuid, own_processes=_PROCESSES)
    subject = LaunchSubject.of(call, device, measuring_environment(device, monitor, options.terms.regime))
    tools = SearchTools(
        open_compiler=lambda: LaunchCompiler(call, device.limits.cc, machine.ahead),
        open_runner=partial(_launch_runner, subject, monitor, options, machine),
    )
    with Recorder(store) as recorder:
        make_proposals = partial(_proposals, options)
        known = Knowledge.none(subject) if afresh else Knowledge.of(subject, store, all_rounds=options.exhaustive)
        run = Run(known, recorder, options.terms, make_proposals, options.objective, started)
        report = run.execute(_limit(call, options, known), on_progress, tools)
    rates = rates_of(call, report.best.config, report.best.time_us or 0.0, device)
    return replace(report, notes=(*report.notes, rates)) if rates else report


@contextmanager
def _launch_runner(
    subject: LaunchSubject,
    monitor: GpuMonitor,
    options: SearchOptions,
    machine: LaunchMachine,
    anchor: LaunchConfig | None,
    on_wait: Callable[[str], None],
) -> Iterator[LaunchRunner]:
    """Yield what measures a call; the GPU is locked meanwhile."""
    if brings_its_own_bench(subject.call.tuner):
        logger.warning("%s: a search times launches by events, not by the kernel's `do_bench`.", subject.call.name)
    runner = machine.runner(subject.call, anchor=anchor, monitor=monitor, terms=options.terms)
    with locked(runner, subject.device, on_wait):
        yield runner


def _proposals(
    options: SearchOptions, subject: LaunchSubject, assignment: Assignment[LaunchConfig]
) -> Proposals[LaunchConfig]:
    listed = kept_proposals(options.sampler, options.study, subject, assignment)
    most = subject.call.settings.expand
    return Neighbourhood(listed, subject, most) if most else listed


def _limit(call: AutotunedCall, options: SearchOptions, known: Knowledge[KernelProblem, LaunchConfig]) -> Limit:
    """Return when the search of a call stops: where nothing is bounded, after the list and what may be tried beyond.

    What is known of other lists counts as tried beyond this one, but takes no place in it.
    """
    budget = options.budget
    listed_or_known = {*call.configs, *(trial.config for trial in known.trials)}
    everything = max(len(call.configs) + call.settings.expand, len(listed_or_known))
    trials = everything if options.exhaustive or budget.trials is None else budget.trials
    return Limit(trials=trials, seconds=budget.seconds or _UNBOUNDED)
