"""A store that anyone may have written: every value is bounded when it is read, whoever reads it."""

import contextlib
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from blocktune.db.exchange.merging import Results
from blocktune.db.records.bounds import require_sound_best, require_sound_trial
from blocktune.db.records.records import Best, Trial
from blocktune.db.records.row_values import UNREADABLE
from blocktune.db.records.rows import best_of, trial_of
from blocktune.db.recovery.rebuild import recover
from blocktune.db.sources import read_results
from blocktune.db.store import ResultStore
from blocktune.db.tables.models import Base, BestRow, TrialRow
from blocktune.kernels.values.errors import BlocktuneError, StoreCorruptError, StoreError

TABLES = {name: Base.metadata.tables[name] for name in BestRow.metadata.tables if not name.startswith("user_")}
COLUMNS = sorted((name, column.name) for name, table in TABLES.items() for column in table.columns)

JSON_JUNK = st.sampled_from(
    [
        "{}",
        "[]",
        "null",
        "1e999",
        '{"kernel": 3}',
        "[" * 2000,
        '{"kernel": "flash_fwd", "ir_override": "/tmp/x"}',
        "NaN",
    ]
)
JUNK = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["\x1b]0;title\x07", "x" * 70_000, "2999-13-01", "0001-01-01 00:00:00.000000", "measured", "ok"])
    | JSON_JUNK
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, best: Best, trial: Trial) -> Path:
    path = tmp_path_factory.mktemp("sound") / "blocktune.db"
    with ResultStore.open(path) as store:
        store.merge([Results(bests=(best,), trials=(trial,))], trust=True)
    return path


def spoilt(sound: Path, table: str, column: str, value: Any) -> Path:
    """A copy of the store with the value in this column, from an author who knows no checksums."""
    path = shutil.copyfile(sound, sound.with_name("spoilt.db"))
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        try:
            connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
        except sqlite3.IntegrityError:  # a NULL where SQLite itself allows none, or a key twice
            return sound
        for name in ("device", "trial", "best"):
            connection.execute(f"UPDATE {name} SET checksum = NULL")
    return path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(COLUMNS), value=JUNK)
def test_any_value_anywhere_is_refused_or_within_its_bounds(sound: Path, place: tuple[str, str], value: Any) -> None:
    with ResultStore.open(spoilt(sound, *place, value), read_only=True) as store, contextlib.suppress(StoreError):
        for trial in store.trials():
            require_sound_trial(trial)
        for winner in store.bests():
            require_sound_best(winner)
        store.devices()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JUNK | st.lists(st.integers() | st.floats() | st.text(max_size=3), max_size=3))
def test_no_row_becomes_a_record_that_breaks_a_rule(rows: tuple[TrialRow, BestRow], data: Any, value: Any) -> None:
    row, convert = data.draw(st.sampled_from([(rows[0], trial_of), (rows[1], best_of)]))
    part = data.draw(st.sampled_from([row, row.device, row.environment, row.shape, row.kernel, row.config]))
    name = data.draw(st.sampled_from([column.name for column in part.__table__.columns if column.name != "id"]))
    kept = getattr(part, name)
    setattr(part, name, value)
    try:
        record = convert(row)
    except UNREADABLE:
        return
    finally:
        setattr(part, name, kept)
    (require_sound_trial if isinstance(record, Trial) else require_sound_best)(record)


@pytest.fixture(scope="module")
def rows(sound: Path) -> tuple[TrialRow, BestRow]:
    """The rows of the sound store, out of its reach."""
    with Session(create_engine(f"sqlite:///{sound}", poolclass=NullPool)) as session:
        found = session.scalars(select(TrialRow)).one(), session.scalars(select(BestRow)).one()
        session.expunge_all()
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("trial", "time_us", -1.0),
        ("trial", "samples_us", '["1"]'),
        ("trial", "created_at", "yesterday"),
        ("trial", "limiters", '["\\u001b[2J"]'),
        ("trial", "outcome", "excellent"),
        ("trial", "temperature_c", 10**9),
        ("best", "speedup_low", 1e99),
        ("best", "origin", "guessed"),
        ("environment", "triton", "\x1b]0;title\x07"),
        ("device", "document", '{"name": "NVIDIA H200", "cc": "9.0", "num_sms": 132, "source": "driver", "hook": 1}'),
    ],
)
def test_a_value_out_of_bounds_is_named_with_the_way_out(sound: Path, table: str, column: str, value: Any) -> None:
    path = spoilt(sound, table, column, value)
    with ResultStore.open(path) as store, pytest.raises(StoreCorruptError, match=r"tune doctor --recover"):
        [*store.bests(), *store.trials()]
    with pytest.raises(BlocktuneError):
        read_results(str(path), trials=True)
    found = recover(path)
    assert found is not None
    Path(found.kept).unlink()
    assert recover(path) is None
