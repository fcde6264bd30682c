"""Thousands of records in one merge: few statements, so the lock is held for moments, and the rules of single ones."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import event

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import UsageError


def many(trial: Trial, count: int) -> list[Trial]:
    return [
        replace(
            trial,
            config=replace(trial.config, extra=(("n", n),)),
            shape=replace(trial.shape, batch=1 + n % 50),
            device=replace(trial.device, uuid=f"GPU-{n % 8}"),
        )
        for n in range(count)
    ]


def test_a_merge_takes_few_statements_however_much_it_brings(store: ResultStore, trial: Trial, best: Best) -> None:
    trials = tuple(many(trial, 400))
    bests = tuple(replace(best, shape=replace(best.shape, batch=n + 1)) for n in range(200))
    statements: list[str] = []
    event.listen(
        store._engines.reader, "before_cursor_execute", lambda *arguments: statements.append(arguments[2])
    )  # the writer shares its engine
    for rerun in (False, True):
        statements.clear()
        counts = store.merge([Results(bests=bests, trials=trials)], trust=True)
        assert (counts.trials, counts.trials_kept) == ((0, 400) if rerun else (400, 0))
        assert (counts.bests, counts.bests_kept) == ((0, 200) if rerun else (200, 0))
        assert 5 < len(statements) < 60
    by_config = {(each.config, each.shape): each for each in store.trials()}
    assert by_config == {(each.config, each.shape): each for each in trials}
    assert {each.shape: each for each in store.bests()} == {each.shape: each for each in bests}


def test_of_several_trials_of_one_candidate_the_one_made_here_and_the_younger_stays(
    store: ResultStore, trial: Trial
) -> None:
    younger = replace(trial, created_at=trial.created_at + timedelta(hours=1), time_us=50.0)
    imported = replace(trial, imported=True, created_at=trial.created_at + timedelta(days=1), time_us=70.0)
    offered = (imported, trial, younger, trial, imported)
    counts = store.merge([Results(trials=offered)], trust=True)
    assert [each.time_us for each in store.trials()] == [50.0]
    assert (counts.trials, counts.trials_kept) == (3, 2)
    youngest = replace(younger, created_at=younger.created_at + timedelta(hours=1), time_us=40.0)
    store.merge([Results(trials=(youngest, *many(trial, 20)))], trust=True)
    assert store.trials()[-1].time_us == 40.0
    assert len(store.trials()) == 21


def test_one_record_that_breaks_a_rule_leaves_nothing_of_all(store: ResultStore, trial: Trial, best: Best) -> None:
    broken = replace(trial, shape=replace(trial.shape, batch=77), compile_seconds=-1.0)
    with pytest.raises(UsageError, match="compile_seconds"):
        store.merge([Results(bests=(best,), trials=(*many(trial, 5), broken))], trust=True)
    assert (store.trials(), store.bests()) == ([], [])
    assert store.health().rows["shape"] == 0
