"""Whether the stored winner of an autotuned call still wins, and still computes what the first config does."""

import time
from collections.abc import Iterable

from blocktune.db.records.records import KernelBest, KernelTrial
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.runtime.autotuned.call import FAR, AutotunedCall
from blocktune.runtime.autotuned.config import BYTES, PROGRAMS, KernelProblem, LaunchConfig
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.tune_launch import tune_launch
from blocktune.tuner.upkeep.verification import Recheck, Verification


def stored_winner(call: AutotunedCall, device: DeviceSpec, store: ResultStore) -> KernelBest | None:
    """Return the winner that a store holds for a call, or for one of nearly its size, which serves it as well; version
    0.1 stored none with its size."""
    wanted = call.listed_problem.without(PROGRAMS, BYTES)
    found = (
        (call.size_factor(best.shape.problem), best)
        for best in store.kernel_bests(device)
        if (best.config.kernel, best.kernel_hash) == (call.name, call.source_hash)
        and best.shape.problem.without(PROGRAMS, BYTES) == wanted
    )
    near = [each for each in found if each[0] <= FAR]
    return min(near, key=lambda each: each[0])[1] if near else None


def verify_launch(
    call: AutotunedCall, label: str, device: DeviceSpec, store: ResultStore, before: KernelBest | None
) -> Verification:
    """Measure all configs of a call again, and store who wins now.

    Args:
        call: the call.
        label: what people know it by.
        device: the GPU that is here.
        store: where the winner is.
        before: the winner that was stored.

    Raises:
        NoFeasibleConfigError: no config runs and computes what the first one does.
    """
    started, problem = time.monotonic(), KernelProblem(call.name, call.sized_problem)

    def trials_of(best: KernelBest) -> list[KernelTrial]:
        return store.trials(device, problem, environment=best.environment, kernel_hash=call.source_hash)

    then = {} if before is None else _times(trials_of(before)) | {before.config: before.time_us}
    report = tune_launch(call, device, store, SearchOptions(sampler="enumeration"), afresh=True)
    rechecks = tuple(_rechecks(call, before, then, trials_of(report.best)))
    return Verification(
        label=label,
        before=before,
        after=report.best,
        rechecks=rechecks,
        reason=report.reason + _loss(before, report.best, rechecks),
        seconds=time.monotonic() - started,
        verified=True,
    )


def _times(trials: Iterable[KernelTrial]) -> dict[LaunchConfig, float | None]:
    return {trial.config: trial.time_us for trial in trials}


def _rechecks(
    call: AutotunedCall,
    before: KernelBest | None,
    then: dict[LaunchConfig, float | None],
    again: Iterable[KernelTrial],
) -> Iterable[Recheck]:
    """Yield each config then and now: those of the list, and a winner from beyond it."""
    roles = dict.fromkeys(call.configs, "runner-up") | {call.default: "default"}
    if before is not None:
        roles[before.config] = "winner"
    for trial in again:
        if trial.config in roles:
            yield Recheck(
                config=trial.config,
                role=roles[trial.config],
                before_us=then.get(trial.config),
                after_us=trial.time_us,
                outcome=trial.outcome,
                problem=trial.error,
            )


def _loss(before: KernelBest | None, after: KernelBest, rechecks: Iterable[Recheck]) -> str:
    """Return how much longer the stored winner takes than the one now, where that is another one."""
    old_us = next((each.after_us for each in rechecks if each.role == "winner"), None)
    if before is None or before.config == after.config or not old_us or not after.time_us:
        return ""
    return f"; the stored one takes {old_us / after.time_us - 1:.1%} longer"
