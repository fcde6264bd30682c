"""The use case: tune one shape on one device, from the space to the stored winner.

    report = tune(complete_shape(8192, 64))
    print(report.best.config.label, report.best.time_us)

With a GPU the configs are measured; for a device that is only named they are compiled and ranked by the model.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from blocktune.db.recorder import Recorder
from blocktune.db.records.records import Environment, Objective, Regime
from blocktune.db.store import ResultStore
from blocktune.kernels.base.kernel import AttentionKernel
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import competing
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile_server.background import PreparingCompiler
from blocktune.tuner.measure.device_choice import choose_device, is_present
from blocktune.tuner.measure.environment import measuring_environment, predicting_environment
from blocktune.tuner.measure.locked_runner import gpu_runner
from blocktune.tuner.measure.measurement import Terms
from blocktune.tuner.measure.protocol import DEFAULT_REGIME
from blocktune.tuner.measure.runner import GpuRunner, Runner
from blocktune.tuner.measure.telemetry import GpuMonitor
from blocktune.tuner.search.arguments import require_arguments, require_possible
from blocktune.tuner.search.history import Knowledge
from blocktune.tuner.search.kept_study import kept_proposals
from blocktune.tuner.search.report import Budget, Limit, OnProgress, TuningReport, effective_budget
from blocktune.tuner.search.run import Run, SearchTools, farm_for
from blocktune.tuner.search.strategies import DEFAULT, require_strategy
from blocktune.tuner.subject.attention import AttentionSubject, ShapeCompiler

_UNBOUNDED = 1 << 30
"""More configs, and more seconds, than any run has."""


def tune(
    shape: AttentionShape,
    *,
    device: DeviceSpec | str | None = None,
    store: ResultStore | None = None,
    budget: Budget | None = None,
    kernels: Sequence[AttentionKernel] | None = None,
    exhaustive: bool = False,
    regime: Regime | None = None,
    objective: Objective = Objective.TIME,
    sampler: str = DEFAULT,
    study: str | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    compiler: PreparingCompiler | None = None,
    runner: Runner | None = None,
) -> TuningReport:
    """Find the best config of a shape, store it and every trial, and report.

    Trials that the store holds for the same device, software, kernel source and shape count as made. A run that had
    been finished before answers from the store at once.

    Args:
        shape: what to tune.
        device: where, or its name; None is the choice of `choose_device()`.
        store: where results are kept; None is the user's store.
        budget: bounds, earlier runs' trials and time included; a bound that is None takes its default.
        kernels: those to search; None is all.
        exhaustive: try every config that can run with all of its rounds, whatever the budget, those that are certainly
            slow included.
        regime: how the GPU works while it is measured; None is `DEFAULT_REGIME`.
        objective: what the finals choose the winner by.
        sampler: which config is next: a name of `STRATEGIES`, or `package.module:Class` of an Optuna sampler.
        study: URL or SQLite file of the Optuna storage that keeps the study too; None keeps it in memory.
        seed: of the sampler and of the checked inputs.
        on_progress: called with where the run stands, several times per second at most.
        compiler: compiles ahead; None is a `CompileFarm`.
        runner: measures; a `GpuRunner` turns to the shape. None is one for this shape alone, or the model where the
            device is not present.

    Raises:
        UnknownDeviceError: no device has this name.
        UsageError: the shape does not fit the device's memory, a rate that predicting needs is unknown, a regime or
            the objective energy was given for a device that is not here, or the GPU does not tell its energy.
        WrongTypeError: the shape, the device, the budget or a kernel is something else.
        NoFeasibleConfigError: no config fits, compiles and computes the right result.
        KeyboardInterrupt: interrupted before anything was found; trials are kept.
    """
    require_arguments(shape, budget, kernels)
    require_strategy(sampler)
    device = device if isinstance(device, DeviceSpec) else choose_device(device)
    own_runner = runner is not None and not isinstance(runner, GpuRunner)
    require_possible(shape, device, regime, Objective.TIME if own_runner else objective)
    bounds = effective_budget(budget or Budget(), present=is_present(device), exhaustive=exhaustive)
    limit = Limit(trials=bounds.trials or _UNBOUNDED, seconds=bounds.seconds or _UNBOUNDED)
    started, terms = time.monotonic(), Terms(seed=seed, regime=regime or DEFAULT_REGIME, race=not exhaustive)
    monitor = GpuMonitor(device.uuid if is_present(device) else None, own_processes=1)
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(ResultStore.open())
        recorder = stack.enter_context(Recorder(store))
        environment = _environment(device, monitor, terms.regime)
        nearest = store.nearest(device, shape)
        subject = AttentionSubject.of(
            shape, device, environment, kernels or competing(), nearest, exhaustive=exhaustive
        )
        tools = SearchTools(
            open_compiler=partial(_shape_compiler, subject, compiler),
            open_runner=partial(_shape_runner, subject, runner, monitor, terms),
        )
        knowledge = Knowledge.of(subject, store, all_rounds=not terms.race)
        run = Run(knowledge, recorder, terms, partial(kept_proposals, sampler, study), objective, started)
        return run.execute(limit, on_progress or (lambda progress: None), tools)


def _environment(device: DeviceSpec, monitor: GpuMonitor, regime: Regime) -> Environment:
    if not is_present(device):
        return predicting_environment(device)
    return measuring_environment(device, monitor, regime)


@contextlib.contextmanager
def _shape_compiler(subject: AttentionSubject, farm: PreparingCompiler | None) -> Iterator[ShapeCompiler]:
    """Yield what compiles the configs of a subject: a farm that is there already, or one for it alone."""
    with contextlib.nullcontext(farm) if farm is not None else farm_for(subject.device) as opened:
        yield ShapeCompiler(opened, subject.shape, subject.device.limits.cc)


@contextlib.contextmanager
def _shape_runner(
    subject: AttentionSubject,
    runner: Runner | None,
    monitor: GpuMonitor,
    terms: Terms,
    anchor: KernelConfig | None,
    on_wait: Callable[[str], None],
) -> Iterator[Runner | None]:
    """Yield what measures a subject: a runner that is there already, or one for it alone; None for a device that is not
    here."""
    with contextlib.ExitStack() as stack:
        if runner is None and is_present(subject.device):
            runner = stack.enter_context(gpu_runner(subject.shape, subject.device, monitor, on_wait, terms))
        if isinstance(runner, GpuRunner):
            runner.turn_to(subject.shape, anchor, terms)
        yield runner
