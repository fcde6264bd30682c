"""Whether a stored winner still wins, and still computes the right result, on this GPU with the software that is here.

After an upgrade of the driver, Triton or a kernel the stored times are of yesterday, and a winner from another machine
was never checked here. A verification checks and times the winner, its runners-up, the default and FA's heuristic
again, by the search's own means and finals, and stores who wins as measured here. A winner that the machine kept from
running, such as by memory that another process has, stays as it is.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from blocktune.db.records.records import Best, Environment, Objective, Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import KERNELS, competing
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server.background import PreparingCompiler
from blocktune.tuner.compile_server.farm import default_workers
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.measure.runner import Runner
from blocktune.tuner.search.finals import Result, hold_finals, rank_trials
from blocktune.tuner.search.loop import Search
from blocktune.tuner.search.proposals import Enumeration
from blocktune.tuner.search.report import Limit, Progress
from blocktune.tuner.subject.attention import AttentionSubject, ShapeCompiler
from blocktune.tuner.upkeep.is_current import is_live
from blocktune.tuner.upkeep.verification import Recheck, Verification

RUNNERS_UP = 4
"""How many of the next best configs of the earlier search are timed again."""

_UNBOUNDED_SECONDS = float(1 << 30)


def compile_ahead(
    best: Best, *, device: DeviceSpec, store: ResultStore, compiler: PreparingCompiler
) -> "list[Future[CompileResult]]":
    """Have what a verification of a winner times compiled in the background, and return the compiles; then, which is
    not waited for, what confirms who wins.

    There are none where no kernel computes the shape any more; the verification says so when it is its turn.
    """
    try:
        contenders = find_contenders(best.shape, device, competing(), ())
    except NoFeasibleConfigError:
        return []
    shape, cc = best.shape, device.limits.cc
    configs = _able(_roles(best, contenders, _earlier_trials(best, store)), shape, device)
    compiles = [compiler.submit(config.kernel, config, shape, cc) for config in configs]
    for config in configs:
        compiler.submit_with_lse(config.kernel, config, shape, cc)
    return compiles


def verify(
    best: Best,
    *,
    device: DeviceSpec,
    environment: Environment,
    store: ResultStore,
    compiler: PreparingCompiler,
    runner: Runner,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Verification:
    """Check and time a winner and its rivals again and store the trials and who wins now.

    Args:
        best: the stored winner.
        device: the GPU that is here, of the winner's kind.
        environment: the software that is here; the regime is the winner's.
        store: where the winner is.
        compiler: compiles ahead.
        runner: measures the winner's shape on the device, under its regime.
        on_progress: called with where the run stands.

    Raises:
        NoFeasibleConfigError: no kernel computes the shape on this device.
    """
    started = time.monotonic()
    environment = replace(environment, regime=best.environment.regime)
    contenders = find_contenders(best.shape, device, competing(), ())
    earlier = _earlier_trials(best, store)
    roles = _roles(best, contenders, earlier)
    able = _able(roles, best.shape, device)
    subject = AttentionSubject(
        device=device, environment=environment, shape=best.shape, kernels=_kernels(able), contenders=contenders
    )
    objective = Objective(best.objective)
    again = _measured_again(subject, able, store, compiler, runner, on_progress, objective)
    rechecks = tuple(_recheck(config, roles, best, earlier, again, device) for config in roles)
    found = Verification(
        label=best.shape.label,
        before=best,
        after=best,
        rechecks=rechecks,
        reason=_unverified_reason(best, again),
        seconds=0.0,
    )
    if not found.reason:
        found = _settle(found, best, subject, again, store)
    return replace(found, seconds=time.monotonic() - started)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """The repeated measurements: the new trials, which of them failed by the machine, and the finals; None where no
    config runs and is right."""

    trials: dict[KernelConfig, Trial]
    stopped_by_machine: Collection[KernelConfig]
    result: Result | None


def _unverified_reason(best: Best, again: _Again) -> str:
    """Return why the stored winner stays although nothing is known of it now; empty where what was measured decides."""
    trial = again.trials.get(best.config)
    if trial is not None and (best.config in again.stopped_by_machine or trial.outcome is Outcome.COMPILE_TIMEOUT):
        return f"it failed by this machine, not by itself: {trial.error.rstrip('.')}"
    wrong = trial is not None and trial.outcome is Outcome.WRONG_RESULT
    return "nothing that was timed again runs here" if again.result is None and not wrong else ""


def _settle(
    found: Verification, best: Best, subject: AttentionSubject, again: _Again, store: ResultStore
) -> Verification:
    """Store who wins now, or forget a wrong winner that nothing can replace, and return what was decided."""
    if again.result is None:
        store.remove_best(best)
        return replace(
            found, after=None, verified=True, reason="nothing that was timed again computes the right result"
        )
    after = _winner(subject, again.result, again.trials, store)
    store.set_best(after)
    return replace(found, after=after, verified=True, reason=again.result.verdict.reason)


def _earlier_trials(best: Best, store: ResultStore) -> dict[KernelConfig, Trial]:
    """Return the trials among which the winner won, fastest first."""
    found = (trial for trial in store.trials(best.device, best.shape) if trial.environment == best.environment)
    return {trial.config: trial for trial in rank_trials(found)}


def _roles(best: Best, contenders: Contenders, earlier: dict[KernelConfig, Trial]) -> dict[KernelConfig, str]:
    """Return who is timed again, and as what; the present default first, since it is the anchor."""
    roles: dict[KernelConfig, str] = {contenders.default: "default", best.config: "winner"}
    if contenders.paper is not None:
        roles.setdefault(contenders.paper, "FA heuristic")
    runners_up = [config for config in earlier if config not in roles][:RUNNERS_UP]
    return roles | dict.fromkeys(runners_up, "runner-up")


def _able(configs: Iterable[KernelConfig], shape: AttentionShape, device: DeviceSpec) -> list[KernelConfig]:
    """Return the configs that can still be compiled."""
    return [config for config in configs if _refusal(config, shape, device) is None]


def _refusal(config: KernelConfig, shape: AttentionShape, device: DeviceSpec) -> str | None:
    """Return why a stored config cannot even be compiled now."""
    kernel = KERNELS.get(config.kernel)
    if kernel is None:
        return f"there is no kernel {config.kernel} any more"
    return next(iter(kernel.violations(config, shape, device.limits)), None)


def _kernels(configs: Sequence[KernelConfig]) -> dict[str, Any]:
    return {config.kernel: KERNELS[config.kernel] for config in configs}


def _measured_again(
    subject: AttentionSubject,
    configs: Sequence[KernelConfig],
    store: ResultStore,
    compiler: PreparingCompiler,
    runner: Runner,
    on_progress: Callable[[Progress], None],
    objective: Objective,
) -> _Again:
    """Measure configs again, and store their trials but those that failed by the machine."""
    search = _search_again(subject, configs, store, compiler, runner, on_progress)
    trials, stopped = search.trials, search.stopped_by_machine
    timed = [config for config, trial in trials.items() if trial.outcome is Outcome.OK]
    if not timed:
        return _Again(trials=trials, stopped_by_machine=stopped, result=None)
    held, failures = _finals(runner, trials, timed, subject, objective)
    for config, failure in failures.items():
        if failure.outcome is not Outcome.OK:
            trials[config] = subject.trial(config, failure.outcome, error=failure.error)
            if failure.transient:
                stopped.add(config)
            else:
                store.record(trials[config])
    return _Again(trials=trials, stopped_by_machine=stopped, result=held)


def _search_again(
    subject: AttentionSubject,
    configs: Sequence[KernelConfig],
    store: ResultStore,
    compiler: PreparingCompiler,
    runner: Runner,
    on_progress: Callable[[Progress], None],
) -> Search:
    """Return a search that has tried all of these configs and stored what it found."""

    search = Search(
        subject,
        Enumeration(configs),
        ShapeCompiler(compiler, subject.shape, subject.device.limits.cc),
        runner=runner,
        known=(),
        record=store.record,
        limit=Limit(trials=len(configs), seconds=_UNBOUNDED_SECONDS),
        lookahead=3 * default_workers(),
        on_progress=on_progress,
    )
    search.run()
    return search


def _finals(
    runner: Runner,
    trials: dict[KernelConfig, Trial],
    timed: Sequence[KernelConfig],
    subject: AttentionSubject,
    objective: Objective,
) -> tuple[Result | None, Mapping[KernelConfig, Measurement]]:
    """Return the finals and who failed them. Where no finalist was confirmed: None, and how each confirmation ended,
    since some may be wrong and others only lost."""
    try:
        held = hold_finals(runner, list(trials.values()), subject, None, objective)
    except NoFeasibleConfigError:
        return None, {config: runner.confirm(config) for config in timed}
    return held, held.failures


def _winner(
    subject: AttentionSubject,
    result: Result,
    trials: dict[KernelConfig, Trial],
    store: ResultStore,
) -> Best:
    winner, contenders = result.verdict.winner, subject.contenders
    made_here = store.trials(subject.device, subject.shape, environment=subject.environment)
    return Best(
        device=subject.device,
        environment=subject.environment,
        shape=subject.shape,
        config=winner,
        kernel_hash=trials[winner].kernel_hash,
        origin=Origin.MEASURED,
        predicted_us=trials[winner].predicted_us,
        default=contenders.default,
        paper=contenders.paper,
        trials=sum(is_live(trial) for trial in made_here),
        **result.columns(contenders.default, contenders.paper),
    )


def _recheck(
    config: KernelConfig,
    roles: dict[KernelConfig, str],
    best: Best,
    earlier: dict[KernelConfig, Trial],
    again: _Again,
    device: DeviceSpec,
) -> Recheck:
    then = earlier.get(config)
    before_us = best.time_us if config == best.config else None if then is None else then.time_us
    recheck = Recheck(config=config, role=roles[config], before_us=before_us, after_us=None, outcome=Outcome.INFEASIBLE)
    now = again.trials.get(config)
    if now is None:
        return replace(recheck, problem=_refusal(config, best.shape, device) or "it was not reached")
    after_us = None if again.result is None else again.result.times_us.get(config)
    return replace(recheck, after_us=after_us or now.time_us, outcome=now.outcome, problem=now.error)
