"""Autotuned kernels in the store: rows there and back, next to attention's, and in stores that are older."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from blocktune.db.records.records import Best, KernelBest, KernelTrial, Outcome, Regime
from blocktune.db.store import ResultStore
from blocktune.db.tables.cleaning import Rules
from blocktune.db.tables.schema import CURRENT
from blocktune.kernels.values.errors import StoreCorruptError, UsageError
from blocktune.runtime.autotuned.config import KernelProblem, LaunchProblem
from tests.db.conftest import KERNEL, PROBLEM, SOURCE
from tests.support.stores.older_stores import make_older


def stored(store: ResultStore, trial: KernelTrial) -> list[KernelTrial]:
    return store.trials(trial.device, trial.shape, environment=trial.environment, kernel_hash=trial.kernel_hash)


def test_rows_come_back_as_they_went(target: str, kernel_trial: KernelTrial, kernel_best: KernelBest) -> None:
    with ResultStore.open(target) as store:
        store.record(kernel_trial)
        store.set_best(kernel_best)
    with ResultStore.open(target) as store:
        assert stored(store, kernel_trial) == [kernel_trial]
        assert store.best(kernel_best.device, PROBLEM, kernel_hash=SOURCE) == kernel_best
        assert store.kernel_bests(kernel_best.device) == [kernel_best]


def test_a_later_trial_or_winner_takes_the_place(
    target: str, kernel_trial: KernelTrial, kernel_best: KernelBest
) -> None:
    later = kernel_trial.created_at + timedelta(seconds=1)
    failed = replace(
        kernel_trial, outcome=Outcome.RUN_ERROR, time_us=None, samples_us=(), error="\x1b[31mno\0", created_at=later
    )
    other = replace(kernel_best, config=kernel_best.default, created_at=later)
    with ResultStore.open(target) as store:
        for trial in (kernel_trial, failed):
            store.record(trial)
        for best in (kernel_best, other):
            store.set_best(best)
        assert stored(store, kernel_trial) == [replace(failed, error="\\x1b[31mno\\x00")]
        assert store.best(kernel_best.device, PROBLEM, kernel_hash=SOURCE) == other


def test_another_source_problem_or_device_is_another_matter(target: str, kernel_best: KernelBest) -> None:
    with ResultStore.open(target) as store:
        store.set_best(kernel_best)
        wider = replace(kernel_best.device, num_sms=114)
        assert store.best(kernel_best.device, PROBLEM, kernel_hash="f" * 16) is None
        assert store.best(kernel_best.device, KernelProblem(KERNEL, LaunchProblem((("scale", 1.0),)))) is None
        assert store.best(wider, PROBLEM) is None


def test_absurd_times_are_refused(target: str, kernel_trial: KernelTrial, kernel_best: KernelBest) -> None:
    with ResultStore.open(target) as store:
        for absurd in (float("nan"), -1.0, 1e11):
            with pytest.raises(UsageError, match="time_us="):
                store.record(replace(kernel_trial, time_us=absurd))
            with pytest.raises(UsageError, match="time_us="):
                store.set_best(replace(kernel_best, time_us=absurd))
        with pytest.raises(UsageError, match="exactly when its outcome is ok"):
            store.record(replace(kernel_trial, outcome=Outcome.RUN_ERROR))
        assert stored(store, kernel_trial) == []


def test_a_damaged_row_is_said(target: str, kernel_best: KernelBest) -> None:
    with ResultStore.open(target) as store:
        store.set_best(kernel_best)
        place = target if "://" in target else f"sqlite:///{target}"
        with create_engine(place, poolclass=NullPool).begin() as connection:
            connection.execute(text("UPDATE best SET checksum = NULL, origin = 'guessed'"))
        with pytest.raises(StoreCorruptError, match="--recover"):
            store.best(kernel_best.device, PROBLEM, kernel_hash=SOURCE)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("kernel", "name", "m:f\x1b]0;owned\x07"),
        ("kernel", "name", "m" * 300),
        ("kernel", "source_hash", "x\n0: __import__('os').system('id'),#"),
        ("kernel", "source_hash", SOURCE.upper() + "!"),
        ("kernel", "source_hash", b"0123456789abcdef"),
        ("shape", "document", '{"x":' + "[" * 100_000),
        ("shape", "document", '{"x":"' + "x" * 5_000_000 + '"}'),
        ("config", "document", '{"a":' + "[" * 100_000),
        ("config", "document", '{"a":1e999}'),
        ("best", "created_at", "yesterday"),
        ("best", "time_us", "fast"),
        ("best", "time_us", 1e11),
        ("best", "default_time_us", -1.0),
        ("best", "speedup_over_default", "twice"),
        ("best", "speedup_low", 1e99),
        ("best", "trials", -1),
        ("best", "trials", 2.5),
        ("trial", "outcome", "excellent"),
        ("trial", "samples_us", "[" * 100_000),
        ("trial", "samples_us", '["1"]'),
        ("trial", "error", b"x"),
        ("trial", "compile_seconds", -1.0),
        ("trial", "relative_to_anchor", 0.0),
    ],
)
def test_a_value_that_blocktune_never_wrote_is_refused_with_its_row(
    path: Path, kernel_trial: KernelTrial, kernel_best: KernelBest, table: str, column: str, value: Any
) -> None:
    with ResultStore.open(path) as store:
        store.put_all([kernel_trial], [kernel_best])
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            for results in ("trial", "best"):
                connection.execute(f"UPDATE {results} SET checksum = NULL")
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = 1", (value,))
        if table != "trial":
            with pytest.raises(StoreCorruptError, match="value that blocktune did not write") as caught:
                store.kernel_bests(kernel_best.device)
            assert len(str(caught.value)) < 1000
        if table in ("trial", "config"):
            with pytest.raises(StoreCorruptError, match="value that blocktune did not write"):
                stored(store, kernel_trial)


@pytest.mark.parametrize("changes", [{"kernel_hash": "a\nb"}, {"kernel_hash": "A" * 16}, {"trials": -1}])
def test_a_winner_that_breaks_a_rule_is_not_written(
    path: Path, kernel_best: KernelBest, changes: dict[str, Any]
) -> None:
    with ResultStore.open(path) as store:
        with pytest.raises(UsageError, match="A row must hold"):
            store.set_best(replace(kernel_best, **changes))
        assert store.kernel_bests(kernel_best.device) == []


def test_cleaning_leaves_them_and_what_they_refer_to(
    target: str, kernel_trial: KernelTrial, kernel_best: KernelBest
) -> None:
    with ResultStore.open(target) as store, ResultStore.open(target) as ours:
        store.record(kernel_trial)
        store.set_best(kernel_best)
        ours.clean(Rules(source_hashes={}, protocol=99), dry_run=False)
        assert stored(store, kernel_trial) == [kernel_trial]
        assert store.best(kernel_best.device, PROBLEM, kernel_hash=SOURCE) == kernel_best


def test_an_older_store_is_upgraded_and_keeps_what_it_has(path: Path, best: Best, kernel_best: KernelBest) -> None:
    with ResultStore.open(path) as store:
        store.set_best(best)
    make_older(path, "0001")
    with ResultStore.open(path) as users, ResultStore.open(path) as store:
        users.set_best(kernel_best)
        assert store.bests() == [best]
        assert best.environment.regime is Regime.SUSTAINED  # as all was before there were regimes
        assert store.health().schema_version == CURRENT
