"""Users' kernels in the store: rows there and back, next to ours, and in stores that are older."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from blocktune.db.records.records import Best, Outcome, Regime
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.store import ResultStore
from blocktune.db.tables.cleaning import Rules
from blocktune.db.tables.schema import CURRENT, VERSION_TABLE
from blocktune.db.user_store import UserKernelStore
from blocktune.kernels.tuned.config import Problem
from blocktune.kernels.values.errors import StoreCorruptError, UsageError
from tests.db.conftest import KERNEL, PROBLEM, SOURCE
from tests.support.stores.older_stores import make_schema_4


def stored(store: UserKernelStore, trial: UserTrial) -> list[UserTrial]:
    return store.trials(trial.device, KERNEL, trial.source_hash, trial.problem, trial.environment)


def test_rows_come_back_as_they_went(target: str, user_trial: UserTrial, user_best: UserBest) -> None:
    with UserKernelStore.open(target) as store:
        store.record(user_trial)
        store.set_best(user_best)
    with UserKernelStore.open(target) as store:
        assert stored(store, user_trial) == [user_trial]
        assert store.best(user_best.device, KERNEL, SOURCE, PROBLEM) == user_best
        assert store.bests(user_best.device) == [user_best]


def test_a_later_trial_or_winner_takes_the_place(target: str, user_trial: UserTrial, user_best: UserBest) -> None:
    later = user_trial.created_at + timedelta(seconds=1)
    failed = replace(
        user_trial, outcome=Outcome.RUN_ERROR, time_us=None, samples_us=(), error="\x1b[31mno\0", created_at=later
    )
    other = replace(user_best, config=user_best.default, created_at=later)
    with UserKernelStore.open(target) as store:
        for trial in (user_trial, failed):
            store.record(trial)
        for best in (user_best, other):
            store.set_best(best)
        assert stored(store, user_trial) == [replace(failed, error="\\x1b[31mno\\x00")]
        assert store.best(user_best.device, KERNEL, SOURCE, PROBLEM) == other


def test_another_source_problem_or_device_is_another_matter(target: str, user_best: UserBest) -> None:
    with UserKernelStore.open(target) as store:
        store.set_best(user_best)
        wider = replace(user_best.device, num_sms=114)
        assert store.best(user_best.device, KERNEL, "f" * 16, PROBLEM) is None
        assert store.best(user_best.device, KERNEL, SOURCE, Problem((("scale", 1.0),))) is None
        assert store.best(wider, KERNEL, SOURCE, PROBLEM) is None


def test_absurd_times_are_refused(target: str, user_trial: UserTrial, user_best: UserBest) -> None:
    with UserKernelStore.open(target) as store:
        for absurd in (float("nan"), -1.0, 1e11):
            with pytest.raises(UsageError, match="time_us="):
                store.record(replace(user_trial, time_us=absurd))
            with pytest.raises(UsageError, match="time_us="):
                store.set_best(replace(user_best, time_us=absurd))
        with pytest.raises(UsageError, match="exactly when its outcome is ok"):
            store.record(replace(user_trial, outcome=Outcome.RUN_ERROR))
        assert stored(store, user_trial) == []


def test_a_damaged_row_is_said(target: str, user_best: UserBest) -> None:
    with UserKernelStore.open(target) as store:
        store.set_best(user_best)
        place = target if "://" in target else f"sqlite:///{target}"
        with create_engine(place, poolclass=NullPool).begin() as connection:
            connection.execute(text("UPDATE user_best SET config = '[]', checksum = NULL"))
        with pytest.raises(StoreCorruptError, match="--recover"):
            store.best(user_best.device, KERNEL, SOURCE, PROBLEM)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("kernel", "m:f\x1b]0;owned\x07"),
        ("kernel", "m" * 300),
        ("source_hash", "x\n0: __import__('os').system('id'),#"),
        ("source_hash", SOURCE.upper() + "!"),
        ("source_hash", b"0123456789abcdef"),
        ("problem", '{"x":' + "[" * 100_000),
        ("problem", '{"x":"' + "x" * 5_000_000 + '"}'),
        ("config", '{"a":' + "[" * 100_000),
        ("config", '{"a":1e999}'),
        ("created_at", "yesterday"),
        ("time_us", "fast"),
        ("time_us", 1e11),
        ("default_time_us", -1.0),
        ("speedup_over_default", "twice"),
        ("speedup_low", 1e99),
        ("trials", -1),
        ("trials", 2.5),
        ("outcome", "excellent"),
        ("samples_us", "[" * 100_000),
        ("samples_us", '["1"]'),
        ("error", b"x"),
        ("seconds", -1.0),
        ("relative_to_anchor", 0.0),
    ],
)
def test_a_value_that_blocktune_never_wrote_is_refused_with_its_row(
    path: Path, user_trial: UserTrial, user_best: UserBest, column: str, value: Any
) -> None:
    with UserKernelStore.open(path) as store:
        store.record(user_trial)
        store.set_best(user_best)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            columns = {
                table: {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
                for table in ("user_trial", "user_best")
            }
            for table in (table for table, names in columns.items() if column in names):
                connection.execute(f"UPDATE {table} SET {column} = ?, checksum = NULL", (value,))
        if column in columns["user_best"]:
            with pytest.raises(StoreCorruptError, match="value that blocktune did not write") as caught:
                store.bests(user_best.device)
            assert len(str(caught.value)) < 1000
        if column in columns["user_trial"] - {"kernel", "source_hash", "problem"}:  # these are filtered by
            with pytest.raises(StoreCorruptError, match="value that blocktune did not write"):
                stored(store, user_trial)


@pytest.mark.parametrize("changes", [{"source_hash": "a\nb"}, {"source_hash": "A" * 16}, {"trials": -1}])
def test_a_winner_that_breaks_a_rule_is_not_written(path: Path, user_best: UserBest, changes: dict[str, Any]) -> None:
    with UserKernelStore.open(path) as store:
        with pytest.raises(UsageError, match="A row must hold"):
            store.set_best(replace(user_best, **changes))
        assert store.bests(user_best.device) == []


def test_cleaning_leaves_them_and_what_they_refer_to(target: str, user_trial: UserTrial, user_best: UserBest) -> None:
    with UserKernelStore.open(target) as store, ResultStore.open(target) as ours:
        store.record(user_trial)
        store.set_best(user_best)
        ours.clean(Rules(source_hashes={}, protocol=99), dry_run=False)
        assert stored(store, user_trial) == [user_trial]
        assert store.best(user_best.device, KERNEL, SOURCE, PROBLEM) == user_best


def test_an_older_store_is_upgraded_and_keeps_what_it_has(path: Path, best: Best, user_best: UserBest) -> None:
    with ResultStore.open(path) as store:
        store.set_best(best)
    make_schema_4(path)
    with closing(sqlite3.connect(path)) as connection:  # as the first schema left it
        for statement in ("VIEW user_dispatch", "TABLE user_trial", "TABLE user_best"):
            connection.execute(f"DROP {statement}")
        connection.execute("ALTER TABLE environment DROP COLUMN regime")
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
        connection.commit()
    with UserKernelStore.open(path) as users, ResultStore.open(path) as store:
        users.set_best(user_best)
        assert store.bests() == [best]
        assert best.environment.regime is Regime.SUSTAINED  # as all was before there were regimes
        assert store.health().schema_version == CURRENT
