"""Stores with many trials, for tests of what becomes of them."""

from dataclasses import replace
from pathlib import Path

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Outcome, Trial
from blocktune.db.store import ResultStore


def filled(path: Path, best: Best, trial: Trial, count: int) -> list[Trial]:
    trials = [
        replace(
            trial,
            config=replace(trial.config, extra=(("n", n),)),
            outcome=Outcome.OK if n % 3 else Outcome.RUN_ERROR,
            time_us=99.5 if n % 3 else None,
            error="e" * 100,
        )
        for n in range(count)
    ]
    with ResultStore.open(path) as store:
        store.merge([Results(bests=(best,), trials=tuple(trials))], trust=True)
    return trials
