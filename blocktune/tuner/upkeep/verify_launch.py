"""Whether the stored winner of an autotuned call still wins, and still computes what the first config does."""

from dataclasses import dataclass

from blocktune.db.records.records import KernelBest, KernelTrial, Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.runtime.autotuned.call import AutotunedCall
from blocktune.runtime.autotuned.config import KernelProblem
from blocktune.tuner.search.arguments import SearchOptions
from blocktune.tuner.search.report import TuningReport
from blocktune.tuner.search.tune_launch import tune_launch


@dataclass(frozen=True, slots=True)
class LaunchVerification:
    """A call measured again. before: the winner that was stored; None where there was none. again: how that one did
    now."""

    before: KernelBest | None
    again: KernelTrial | None
    report: TuningReport

    @property
    def problem(self) -> str | None:
        """What is wrong with the results of the winner that was stored, if anything is."""
        is_wrong = self.again is not None and self.again.outcome is Outcome.WRONG_RESULT
        return self.again.error if self.again is not None and is_wrong else None

    @property
    def loss(self) -> float | None:
        """How much longer the winner that was stored takes than the one now, as a part of its time."""
        now_us = self.report.best.time_us
        if self.again is None or self.again.time_us is None or not now_us:
            return None
        return float(self.again.time_us / now_us - 1)


def stored_winner(call: AutotunedCall, device: DeviceSpec, store: ResultStore) -> KernelBest | None:
    """Return the winner of a call that a store holds."""
    return store.best(device, KernelProblem(call.name, call.listed_problem), kernel_hash=call.source_hash)


def verify_launch(
    call: AutotunedCall, device: DeviceSpec, store: ResultStore, before: KernelBest | None
) -> LaunchVerification:
    """Measure all configs of a call again, and store who wins now.

    Args:
        call: the call.
        device: the GPU that is here.
        store: where the winner is.
        before: the winner that was stored.

    Raises:
        NoFeasibleConfigError: no config runs and computes what the first one does.
    """
    report = tune_launch(call, device, store, SearchOptions(sampler="enumeration"), afresh=True)
    trials = store.trials(
        device,
        KernelProblem(call.name, call.problem),
        environment=report.best.environment,
        kernel_hash=call.source_hash,
    )
    again = next((trial for trial in trials if before is not None and trial.config == before.config), None)
    return LaunchVerification(before, again, report)
