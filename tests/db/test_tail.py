"""New trials are found by a high-water mark, on SQLite and on PostgreSQL."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from blocktune.db.records.records import Best, Regime, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tail import StoreTail
from blocktune.kernels.values.errors import StoreError
from tests.support.stores.bad_stores import changed_by

MINUTE = timedelta(minutes=1)


@pytest.fixture
def tail(store: ResultStore) -> Iterator[StoreTail]:
    opened = StoreTail.open(store.target)
    yield opened
    opened.close()


def other(trial: Trial, number: int) -> Trial:
    """Another candidate of the same shape."""
    config = replace(trial.config, extra=(("swizzle", number),))
    return replace(trial, config=config, created_at=trial.created_at + number * MINUTE)


def test_groups_are_shapes_by_device_and_regime_the_youngest_first(
    store: ResultStore, tail: StoreTail, trial: Trial
) -> None:
    longer = replace(trial, shape=replace(trial.shape, seqlen_q=512))
    rested = replace(trial, environment=replace(trial.environment, regime=Regime.BURST))
    newer = replace(trial, environment=replace(trial.environment, triton="3.7.0"))
    for one in (trial, longer, rested, newer):
        store.record(one)
    found = tail.groups()
    assert [(group.shape, group.regime, group.count) for group in found] == [
        (trial.shape, Regime.SUSTAINED, 2),
        (trial.shape, Regime.BURST, 1),
        (longer.shape, Regime.SUSTAINED, 1),
    ]
    assert {group.device for group in found} == {replace(trial.device, uuid=None)}
    assert len({group.id for group in found}) == 3


def test_only_groups_with_new_rows_are_named_again(store: ResultStore, tail: StoreTail, trial: Trial) -> None:
    store.record(trial)
    (first,) = tail.groups()
    assert tail.groups(first.last_id) == []
    store.record(replace(trial, shape=replace(trial.shape, seqlen_q=512)))
    assert [group.shape.seqlen_q for group in tail.groups(first.last_id)] == [512]


def test_trials_after_a_mark_are_the_new_ones(store: ResultStore, tail: StoreTail, trial: Trial) -> None:
    store.record(trial)
    (group,) = tail.groups()
    found, mark = tail.trials(group)
    assert found == [trial]
    assert tail.trials(group, mark) == ([], mark)
    late = replace(other(trial, 1), created_at=trial.created_at - MINUTE)  # it waited for the store
    store.record(late)
    store.record(replace(trial, shape=replace(trial.shape, seqlen_q=512)))
    found, further = tail.trials(group, mark)
    assert found == [late]
    assert tail.trials(group, further) == ([], further)


def test_a_candidate_that_is_measured_again_is_new(store: ResultStore, tail: StoreTail, trial: Trial) -> None:
    store.record(trial)
    (group,) = tail.groups()
    _, mark = tail.trials(group)
    again = replace(trial, time_us=50.0, created_at=trial.created_at + MINUTE)
    store.record(again)
    assert tail.trials(group, mark)[0] == [again]


def test_a_date_of_a_wrong_clock_hides_nothing(store: ResultStore, tail: StoreTail, trial: Trial) -> None:
    now = datetime.now(UTC)
    store.record(replace(other(trial, 1), created_at=now + timedelta(hours=12)))
    store.record(replace(trial, created_at=now - MINUTE))
    (group,) = tail.groups()
    mark = tail.trials(group)[1]
    assert mark.at <= datetime.now(UTC)
    again = replace(trial, time_us=50.0, created_at=datetime.now(UTC) + MINUTE)
    store.record(again)
    assert again in tail.trials(group, mark)[0]


def test_the_mark_of_winners_changes_with_them(store: ResultStore, tail: StoreTail, best: Best) -> None:
    marks = [tail.winners_mark()]
    store.set_best(best)
    marks.append(tail.winners_mark())
    store.set_best(replace(best, created_at=best.created_at + MINUTE))
    marks.append(tail.winners_mark())
    assert len(set(marks)) == 3
    assert tail.winners_mark() == marks[-1]


def test_changed_rows_are_left_out(sqlite_store: ResultStore, trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    sqlite_store.record(trial)
    sqlite_store.record(other(trial, 1))
    sqlite_store.record(replace(trial, shape=replace(trial.shape, seqlen_q=512)))
    path = sqlite_store.target.path
    assert path is not None
    changed_by("UPDATE trial SET time_us = 1.5 WHERE id = 1")(path)
    changed_by("UPDATE shape SET seqlen_q = 7 WHERE seqlen_q = 512")(path)
    tail = StoreTail.open(path)
    (group,) = tail.groups()
    with caplog.at_level(logging.WARNING, logger="blocktune"):
        found, mark = tail.trials(group)
    assert found == [other(trial, 1)]
    assert mark.row_id == 2
    assert "1 row(s) of `trial`" in caplog.text


def test_a_store_that_is_not_there_is_not_made(tmp_path) -> None:
    with pytest.raises(StoreError, match="No such database"):
        StoreTail.open(tmp_path / "missing.db")
    assert list(tmp_path.iterdir()) == []
