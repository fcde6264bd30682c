"""Stores with many trials, for tests of what becomes of them."""

from dataclasses import replace
from pathlib import Path

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Outcome, Trial
from blocktune.db.store import ResultStore
from tests.support.stores.new_stores import new_store


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
    with ResultStore.open(new_store(path)) as store:
        store.merge([Results(bests=(best,), trials=tuple(trials))], trust=True)
    return trials


def files_in(folder: Path) -> list[str]:
    """Return the names of a folder's files, without those that SQLite keeps next to a store while it is open."""
    return sorted(each.name for each in folder.iterdir() if not each.name.endswith(("-wal", "-shm")))
