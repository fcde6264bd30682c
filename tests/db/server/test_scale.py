"""A fleet's store answers from its indexes, however many trials it holds."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.db.tables import schema
from blocktune.db.tables.models import BestRow, TrialRow
from tests.support.stores.large_servers import fill, plan_of, shapes_like
from tests.support.stores.postgres_server import PostgresServer
from tools.stores.server.scale import look_up

SIZES = [pytest.param((200, 100)), pytest.param((2000, 500), marks=pytest.mark.exhaustive)]


@pytest.fixture(autouse=True)
def _rows_without_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQL has copied the rows, and an opening would compute the checksums of a million."""
    monkeypatch.setattr(schema, "_fill_late_rows", lambda engines, fill: None)


@pytest.fixture(scope="module", params=SIZES)
def place(request: pytest.FixtureRequest, own_server: PostgresServer, trial: Trial, best: Best) -> str:
    shapes, configs = request.param
    name = own_server.create_database(f"scale_{shapes}")
    fill(name, trial, replace(best, shape=trial.shape), shapes=shapes, configs=configs)
    return name


def scanned(plan: Any) -> set[str]:
    """Return the tables of a plan that are read from end to end."""
    if isinstance(plan, list):
        return set().union(*map(scanned, plan)) if plan else set()
    if not isinstance(plan, dict):
        return set()
    own = {plan["Relation Name"]} if plan.get("Node Type") == "Seq Scan" else set()
    return own.union(*map(scanned, plan.values()))


def test_look_ups_read_no_large_table_from_end_to_end(place: str, trial: Trial) -> None:
    shape = shapes_like(trial.shape, 200)[77]
    with create_engine(place, poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql("SET join_collapse_limit = 1")
        for row_type in (BestRow, TrialRow):
            plan = plan_of(connection, look_up(row_type, shape))
            assert scanned(plan) <= {"device", "environment", "kernel", "config", "shape", "best"}


def test_what_is_found_is_of_the_shape_alone(place: str, trial: Trial) -> None:
    first, second = shapes_like(trial.shape, 200)[76:78]
    with ResultStore.open(place) as store:
        found = store.trials(trial.device, first)
        assert {each.shape for each in found} == {first}
        assert len({each.config for each in found}) == len(found) >= 100
        winner = store.best(trial.device, second)
        assert winner is not None
        assert winner.shape == second


def test_a_merge_into_a_full_store_changes_its_own_trials_alone(place: str, trial: Trial) -> None:
    shape = shapes_like(trial.shape, 200)[5]
    with ResultStore.open(place) as store:
        (stored,) = (each for each in store.trials(trial.device, shape) if each.config.parameters["n"] == 7)
        younger = replace(stored, time_us=1.25, created_at=stored.created_at.replace(year=stored.created_at.year + 1))
        other = replace(stored, time_us=2.5, created_at=stored.created_at.replace(year=2025), config=trial.config)
        assert store.merge([Results(trials=(younger, other))], trust=True).trials == 2
        times = {each.config.label: each.time_us for each in store.trials(trial.device, shape)}
    assert times[younger.config.label] == 1.25
    assert times[other.config.label] == 2.5
    assert len([time_us for time_us in times.values() if time_us == stored.time_us]) >= 99
