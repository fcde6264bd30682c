"""What questions read: rows in proportion to the answer, by a statement for each table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, event

from blocktune.cli.shared.lookup import look_up
from blocktune.db.records import rows
from blocktune.db.records.records import Best
from blocktune.db.store import ResultStore
from blocktune.runtime.store_reader.provenance import MAX_NEIGHBOURS
from tests.support.stores.sample_records import winner

MANY = 300
LINKS = 7
"""Rows that a winner refers to."""


@pytest.fixture
def full(store: ResultStore, best: Best) -> tuple[ResultStore, list[Best]]:
    """A store with many winners that run the same code, and these."""
    shape = replace(best.shape, seqlen_k=best.shape.seqlen_q)
    stored = [
        replace(best, shape=replace(shape, seqlen_q=100 + number, seqlen_k=100 + number)) for number in range(MANY)
    ]
    store.put_all([], stored)
    return store, stored


@contextmanager
def statements() -> Iterator[list[str]]:
    """Yield what is asked of databases in the block."""
    asked: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT ") and " FROM " in statement and "schema" not in statement:
            asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Best]:
    """The records whose checksums were compared."""
    found: list[Best] = []
    compare: Callable[..., None] = rows.require_as_written

    def noted(record: Any, *compared: Any) -> None:
        found.append(record)
        compare(record, *compared)

    monkeypatch.setattr(rows, "require_as_written", noted)
    return found


def test_all_winners_are_read_by_a_statement_for_each_table_and_checked_once(
    full: tuple[ResultStore, list[Best]], checked: list[Best]
) -> None:
    store, stored = full
    with statements() as asked:
        assert sorted(best.shape.seqlen_q for best in store.bests()) == [best.shape.seqlen_q for best in stored]
    assert len(asked) <= 1 + LINKS
    assert len(checked) == MANY


def test_the_nearest_winners_alone_are_read(full: tuple[ResultStore, list[Best]], checked: list[Best]) -> None:
    store, stored = full
    with statements() as asked:
        found = store.nearest(stored[0].device, stored[150].shape)
    assert [best.shape.seqlen_q for best in found] == [250, 251, 249, 252]
    assert len(checked) == len(found)
    assert len(asked) <= 2 + LINKS


def test_winners_with_other_features_are_no_neighbours(full: tuple[ResultStore, list[Best]], best: Best) -> None:
    store, stored = full
    near, far = (replace(best.shape, seqlen_q=length, seqlen_k=length) for length in (250, 4000))
    windowed = [
        replace(best, shape=replace(shape, features="window=127:0"), default=None, paper=None) for shape in (near, far)
    ]
    store.put_all([], windowed)
    assert [found.shape for found in store.nearest(best.device, windowed[0].shape)] == [
        winner.shape for winner in windowed
    ]
    assert all(not found.shape.features for found in store.nearest(best.device, stored[150].shape))


def test_a_look_up_on_a_server_reads_what_a_rung_may_take(
    new_postgres_database: Callable[[], str], checked: list[Best]
) -> None:
    place, first = new_postgres_database(), winner()
    stored = [
        replace(first, shape=replace(first.shape, seqlen_q=8000 + number, seqlen_k=8000 + number))
        for number in range(MANY)
    ]
    with ResultStore.open(place) as store:
        store.put_all([], stored)
        checked.clear()
        own = look_up(store, place, first.device, stored[150].shape)
        other = look_up(store, place, first.device, replace(first.shape, seqlen_q=8400, seqlen_k=8400))
    assert own.winner is not None
    assert own.winner.shape == stored[150].shape
    assert not own.is_shipped
    assert other.candidate is not None
    assert len(checked) <= 4 * (MAX_NEIGHBOURS + 2)
