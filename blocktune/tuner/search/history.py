"""Results of earlier runs for a subject, as far as they still hold."""

from dataclasses import dataclass
from typing import Any, Generic

from blocktune.db.records.records import AnyBest, AnyTrial, Best, ConfigT, Objective, ProblemT, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import Origin
from blocktune.tuner.candidates.contenders import Contenders
from blocktune.tuner.compile_server.farm import default_workers
from blocktune.tuner.measure.protocol import stopped_early
from blocktune.tuner.search.report import Limit
from blocktune.tuner.subject.subject import Subject

SPENT_ENOUGH = 0.5
"""A run that spent this share of the time budget and was concluded had ended at its deadline. Only half, because the
time is estimated from its trials, and from below."""


@dataclass(frozen=True, slots=True)
class Knowledge(Generic[ProblemT, ConfigT]):
    """Stored trials of the subject's device, problem, software and kernels as they are now, and the stored winner."""

    subject: Subject[ProblemT, ConfigT]
    trials: tuple[Trial[ProblemT, ConfigT], ...]
    best: Best[ProblemT, ConfigT] | None

    @classmethod
    def of(
        cls, subject: Subject[ProblemT, ConfigT], store: ResultStore, *, all_rounds: bool = False
    ) -> "Knowledge[ProblemT, ConfigT]":
        """Read the store. all_rounds: leave out trials that a race stopped early."""
        problem: Any = subject.problem
        winner_problem: Any = subject.winner_problem
        stored: list[AnyTrial] = store.trials(
            subject.device, problem, environment=subject.environment, kernel_hash=subject.kernel_hash
        )
        best: AnyBest | None = store.best(subject.device, winner_problem, kernel_hash=subject.kernel_hash)
        return cls(
            subject=subject,
            trials=subject.comparable(
                [
                    trial
                    for trial in stored
                    if subject.source_hash(trial.config) == trial.kernel_hash
                    and not (all_rounds and stopped_early(trial.samples_us))
                ]
            ),
            best=best if best is not None and subject.source_hash(best.config) == best.kernel_hash else None,
        )

    @classmethod
    def none(cls, subject: Subject[ProblemT, ConfigT]) -> "Knowledge[ProblemT, ConfigT]":
        """Return no knowledge at all, so that everything is measured again."""
        return cls(subject=subject, trials=(), best=None)

    @property
    def spent_seconds(self) -> float:
        """Wall time that the trials took, from below: measuring is serial, compiling is not."""
        compiling = sum(trial.compile_seconds for trial in self.trials) / default_workers()
        return max(compiling, sum(trial.bench_seconds for trial in self.trials))

    @property
    def incumbent(self) -> ConfigT | None:
        """The stored winner, if it was measured with this software."""
        best = self.best
        if best is None or best.origin is not Origin.MEASURED:
            return None
        return best.config if best.environment.digest == self.subject.environment.digest else None

    def finished_best(
        self, limit: Limit, contenders: Contenders[ConfigT], objective: Objective
    ) -> Best[ProblemT, ConfigT] | None:
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
