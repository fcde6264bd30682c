"""A database with the trials of a recorded sweep, and a server that shows it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest

from blocktune.cli.ui import feed
from blocktune.db.records.records import Outcome, Trial
from blocktune.db.store import ResultStore
from blocktune.tuner.lab.sweep_file import load_sweep
from tests.support.pages.reports import DENSE
from tests.support.stores.live_servers import LiveServer, live_server
from tests.support.stores.new_stores import new_store

KNOWN = 30
"""Trials that the database has from the start."""


@cache
def recorded() -> tuple[Trial, ...]:
    """Trials with a time, the anchor first, as if they were made now."""
    timed = [trial for trial in load_sweep(DENSE).trials if trial.outcome is Outcome.OK]
    timed.sort(key=lambda trial: trial.relative_to_anchor != 1.0)
    begun = datetime.now(UTC) - timedelta(minutes=1)
    return tuple(replace(each, created_at=begun + timedelta(milliseconds=n)) for n, each in enumerate(timed))


def filled_store(path: Path) -> Path:
    """Make a database with the first trials."""
    with ResultStore.open(new_store(path)) as store:
        store.put_all(recorded()[:KNOWN], [])
    return path


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A database of one search."""
    return filled_store(tmp_path / "search.db")


@pytest.fixture
def add(db: Path) -> Callable[[Trial], None]:
    """What stores a trial, as a search of another process does."""

    def put(trial: Trial) -> None:
        with ResultStore.open(db) as store:
            store.record(trial)

    return put


@pytest.fixture
def server(db: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server that shows the database, whose search counts as running however slow this machine is."""
    monkeypatch.setattr(feed, "QUIET", timedelta(days=1))
    with live_server(db) as running:
        yield running
