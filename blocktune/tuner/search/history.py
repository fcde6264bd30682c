"""What earlier runs found out about a subject, as far as it still holds."""

from dataclasses import dataclass

from blocktune.db.records.records import Best, Objective, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.tuner.candidates.starting_configs import Contenders
from blocktune.tuner.compile.farm import default_workers
from blocktune.tuner.measure.protocol import stopped_early
from blocktune.tuner.search.report import Limit
from blocktune.tuner.subject.subject import Subject

SPENT_ENOUGH = 0.5
"""A run that spent this share of the time budget and was concluded had ended at its deadline. Only half, because the
time is estimated from its trials, and from below."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Stored trials of the subject's device, problem, software and kernels as they are now, and the stored winner."""

    subject: Subject
    trials: tuple[Trial, ...]
    best: Best | None

    @classmethod
    def of(cls, subject: Subject, store: ResultStore, *, all_rounds: bool = False) -> "Knowledge":
        """Read the store. all_rounds: leave out trials that a race stopped early."""
        stored = store.trials(subject.device, subject.problem, environment=subject.environment)
        best = store.best(subject.device, subject.problem)
        return cls(
            subject=subject,
            trials=tuple(
                trial
                for trial in stored
                if subject.source_hash(trial.config) == trial.kernel_hash
                and not (all_rounds and stopped_early(trial.samples_us))
            ),
            best=best if best is not None and subject.source_hash(best.config) == best.kernel_hash else None,
        )

    @property
    def spent_seconds(self) -> float:
        """Wall time that the trials took, from below: measuring is serial, compiling is not."""
        compiling = sum(trial.compile_seconds for trial in self.trials) / default_workers()
        return max(compiling, sum(trial.bench_seconds for trial in self.trials))

    @property
    def incumbent(self) -> KernelConfig | None:
        """The stored winner, if it was measured with this software."""
        best = self.best
        if best is None or best.origin is not Origin.MEASURED:
            return None
        return best.config if best.environment.digest == self.subject.environment.digest else None

    def finished_best(self, limit: Limit, contenders: Contenders, objective: Objective) -> Best | None:
        """Return the stored winner, if a run under a limit and an objective like these came to its end and nothing
        was tried since."""
        best = self.best
        if best is None or best.trials != len(self.trials) or best.objective != objective:
            return None
        if best.environment.digest != self.subject.environment.digest:
            return None
        tried = {trial.config for trial in self.trials}
        everything = tried.issuperset(contenders.space.feasible)
        enough = len(tried) >= limit.trials or self.spent_seconds >= SPENT_ENOUGH * limit.seconds
        complete = best.origin is Origin.PREDICTED or best.speedup_over_default is not None
        return best if best.config in tried and (everything or enough) and complete else None
