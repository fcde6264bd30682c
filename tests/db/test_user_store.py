"""People's own kernels in the store: rows there and back, beside ours, and in stores that are older."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from blocktune.db.records.records import Best, Outcome, Regime, Trial
from blocktune.db.records.user_records import UserBest, UserTrial
from blocktune.db.store import ResultStore
from blocktune.db.tables.cleaning import Rules
from blocktune.db.tables.schema import CURRENT, VERSION_TABLE
from blocktune.db.user_store import UserKernelStore
from blocktune.kernels.tuned.config import Problem, TensorKind, UserConfig
from blocktune.kernels.values.errors import StoreCorruptError, UsageError

KERNEL, SOURCE = "package.module:softmax", "0123456789abcdef"
PROBLEM = Problem((("scale", 0.5), ("x", TensorKind("float16", (64, 100), (128, 1)))))
CONFIG = UserConfig(KERNEL, (("BLOCK", 128), ("num_warps", 4)))


@pytest.fixture
def user_trial(trial: Trial) -> UserTrial:
    """A trial with a value in every field."""
    return UserTrial(
        device=trial.device,
        environment=trial.environment,
        problem=PROBLEM,
        config=CONFIG,
        source_hash=SOURCE,
        outcome=Outcome.OK,
        time_us=12.5,
        relative_to_anchor=0.9,
        samples_us=(12.0, 12.5, 13.0),
        error="",
        seconds=0.5,
        created_at=trial.created_at,
    )


@pytest.fixture
def user_best(user_trial: UserTrial) -> UserBest:
    return UserBest(
        device=user_trial.device,
        environment=user_trial.environment,
        problem=PROBLEM,
        config=CONFIG,
        source_hash=SOURCE,
        time_us=12.5,
        default=UserConfig(KERNEL, (("BLOCK", 256), ("num_warps", 8))),
        default_time_us=14.0,
        speedup_over_default=1.12,
        speedup_low=1.1,
        speedup_high=1.13,
        trials=8,
        created_at=user_trial.created_at,
    )


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
            with pytest.raises(UsageError, match="`time_us`"):
                store.record(replace(user_trial, time_us=absurd))
            with pytest.raises(UsageError, match="`time_us`"):
                store.set_best(replace(user_best, time_us=absurd))
        with pytest.raises(UsageError, match="constraints"):
            store.record(replace(user_trial, outcome=Outcome.RUN_ERROR))
        assert stored(store, user_trial) == []


def test_a_damaged_row_is_said(target: str, user_best: UserBest) -> None:
    with UserKernelStore.open(target) as store:
        store.set_best(user_best)
        place = target if "://" in target else f"sqlite:///{target}"
        with create_engine(place, poolclass=NullPool).begin() as connection:
            connection.execute(text("UPDATE user_best SET config = '[]'"))
        with pytest.raises(StoreCorruptError, match="tune again"):
            store.best(user_best.device, KERNEL, SOURCE, PROBLEM)


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
