"""Contributed machines vote for configs: two that agree make a winner `community`, whatever comes in between."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from blocktune.db.exchange.merging import Results, distrust_results
from blocktune.db.exchange.votes import AGREEING_MACHINES, machines_of, vote_of, with_all_votes
from blocktune.db.records.records import Best
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import Origin
from tests.support.stores.sample_records import winner

A, B, C = ("a" * 16, "b" * 16, "c" * 16)


def contributed(machine: str, *, num_stages: int = 2, day: int = 1, time_us: float = 100.0) -> Best:
    best = winner()
    best = replace(
        best,
        config=replace(best.config, num_stages=num_stages),
        created_at=datetime(2026, 11, day, tzinfo=UTC),
        time_us=time_us,
    )
    return replace(best, votes=(vote_of(machine, best),))


def stored(path: Path, *bests: Best) -> Best:
    with ResultStore.open(path / "results.db") as store:
        for best in bests:
            store.merge([Results(bests=(best,))])
        (found,) = store.bests(winner().device)
        return found


def test_one_machine_is_borrowed_however_often_it_sends(tmp_path: Path) -> None:
    found = stored(tmp_path, contributed(A), contributed(A, day=2))
    assert (found.origin, machines_of([found])) == (Origin.BORROWED, {A})


def test_two_machines_that_agree_make_a_row_community(tmp_path: Path) -> None:
    found = stored(tmp_path, contributed(A), contributed(B, day=2))
    assert AGREEING_MACHINES == 2
    assert (found.origin, machines_of([found])) == (Origin.COMMUNITY, {A, B})


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_config_that_was_passed_over_counts_when_a_second_machine_finds_it(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    sent = (contributed(A, day=1), contributed(B, num_stages=3, day=2, time_us=90.0), contributed(C, day=3))
    found = stored(tmp_path, *(sent[number] for number in order))
    assert (found.origin, found.config.num_stages) == (Origin.COMMUNITY, 2)
    assert len(found.votes) == 3


def test_a_machine_that_changes_its_mind_takes_its_vote_along(tmp_path: Path) -> None:
    found = stored(tmp_path, contributed(A), contributed(B, day=2), contributed(B, num_stages=3, day=3))
    assert found.origin is Origin.BORROWED


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_changed_mind_counts_in_whatever_order_votes_come(tmp_path: Path, order: tuple[int, ...]) -> None:
    sent = (
        contributed(A, day=1),
        contributed(A, num_stages=3, day=5),
        contributed(B, num_stages=3, day=10),
        contributed(C, day=7, time_us=90.0),
    )
    found = stored(tmp_path, *(sent[number] for number in order))
    assert (found.origin, found.config.num_stages) == (Origin.COMMUNITY, 3)
    assert set(found.votes) == {vote for best in sent[1:] for vote in best.votes}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_votes_of_one_day_the_same_counts_in_both_orders(order: tuple[int, ...]) -> None:
    sent = (contributed(A), contributed(A, num_stages=3))
    (first, second) = with_all_votes([replace(sent[number], origin=Origin.BORROWED) for number in order])
    assert first.votes == second.votes == (max(vote for best in sent for vote in best.votes),)


def test_another_source_of_the_kernel_is_another_config() -> None:
    other = replace(winner(), kernel_hash="0" * 16)
    assert vote_of(A, winner()) != vote_of(A, other)


def test_what_was_measured_here_stays_and_needs_no_votes(tmp_path: Path) -> None:
    with ResultStore.open(tmp_path / "results.db") as store:
        assert store.set_best(winner())
        store.merge([Results(bests=(contributed(A, num_stages=3, time_us=1.0),))])
        assert store.bests(winner().device) == [winner_in(store)]
        assert winner_in(store).origin is Origin.MEASURED


def winner_in(store: ResultStore) -> Best:
    found = store.best(winner().device, winner().shape)
    assert found is not None
    return found


def test_a_stranger_has_the_vote_of_one_machine_at_most(tmp_path: Path) -> None:
    (agreed,) = (stored(tmp_path, contributed(A), contributed(B)),)
    (believed,) = distrust_results(Results(bests=(agreed,))).bests
    assert (believed.origin, believed.votes) == (Origin.BORROWED, ())
    with ResultStore.open(tmp_path / "trusting.db") as store:
        store.merge([Results(bests=(agreed,))], trust=True)
        assert winner_in(store) == agreed


def test_rows_without_votes_are_as_they_were() -> None:
    rows = [winner(), replace(winner(), origin=Origin.BORROWED)]
    assert with_all_votes(rows) == rows
