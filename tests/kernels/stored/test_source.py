"""What the dispatcher reads: rows in good and bad order, and stores that are missing, locked, foreign or damaged."""

import json
import logging
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import frozen_document, save_document, save_text
from blocktune.db.records.records import Regime
from blocktune.db.store import ResultStore, default_store_path
from blocktune.kernels import registry
from blocktune.kernels.dispatch.dispatcher import Dispatcher
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.selection.fallback import ConfigTable
from blocktune.kernels.stored import provenance, store_file
from blocktune.kernels.stored.background import BackgroundRead
from blocktune.kernels.stored.export_file import rows_in_file
from blocktune.kernels.stored.json_pieces import canonical_text
from blocktune.kernels.stored.provenance import Reuse
from blocktune.kernels.stored.sources import (
    JsonConfigs,
    LayeredConfigs,
    SqliteConfigs,
    UserConfigs,
    default_source,
    read_source,
    usable_rows,
)
from blocktune.kernels.stored.store_file import user_store_path
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import StoreError, StoreLockedError, UsageError
from tests.support.bad_stores import BAD_STORES, held_exclusively
from tests.support.dispatch_fakes import (
    H200,
    BrokenSource,
    ListSource,
    PlainKernel,
    best,
    config,
    shape_like,
    store_with,
    tuned,
)

pytestmark = pytest.mark.triton_free

SHAPE = shape_like()
H100 = device_named("h100_sxm5")
ANSWER_SECONDS = 0.05


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", {"plain": PlainKernel()})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return store_with(tmp_path / "store.db", best(SHAPE, config()))


def origins(opened: SqliteConfigs | JsonConfigs, device: Any = H200) -> list[Origin]:
    return [row.origin for row in opened.configs(device)]


def test_a_path_is_text_or_a_path(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResultStore.open(store) as opened:
        save_document(opened.export_json(), str(tmp_path / "h200.json"))
    found = SqliteConfigs(store).configs(H200)
    assert [row.origin for row in found] == [Origin.MEASURED]
    assert SqliteConfigs(str(store)) == SqliteConfigs(store)
    assert SqliteConfigs(str(store)).configs(H200) == found
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("h200.json", Path("h200.json"), "~/h200.json", str(tmp_path / "h200.json")):
        assert JsonConfigs(path).configs(H200) == found
        assert rows_in_file(path)


@pytest.mark.parametrize("path", [42, b"h200.json", "", object()], ids=["number", "bytes", "empty", "object"])
@pytest.mark.parametrize("source", [JsonConfigs, SqliteConfigs])
def test_a_path_that_is_none_is_refused_at_once(source: Any, path: Any) -> None:
    with pytest.raises(UsageError, match=r"A path is text or a pathlib\.Path"):
        source(path)


@pytest.mark.parametrize(
    "source",
    ["h200.json", Path("h200.json"), JsonConfigs, 42, [ListSource([])]],
    ids=["text", "path", "class", "number", "list"],
)
def test_what_is_no_source_is_refused_at_once(source: Any) -> None:
    with pytest.raises(UsageError, match=r"A source of configs has a method `configs\(device\)`, but got"):
        Dispatcher(source)
    with pytest.raises(UsageError, match=r"configs\(device\)"):
        LayeredConfigs((ListSource([]), source))
    dispatcher = Dispatcher(ListSource([]))
    with pytest.raises(UsageError, match=r'JsonConfigs\("h200\.json"\)'):
        dispatcher.use(source)
    assert isinstance(dispatcher.source, ListSource)


def test_layers_are_a_tuple() -> None:
    with pytest.raises(UsageError, match="`layers` is a tuple of sources"):
        LayeredConfigs(ListSource([]))  # type: ignore[arg-type]


def test_a_winner_of_the_store_is_read_without_sqlalchemy(store: Path) -> None:
    assert SqliteConfigs(store).configs(H200) == [tuned(SHAPE, config(), reuse=Reuse.EXACT)]


def test_the_store_is_not_changed_by_reading(store: Path) -> None:
    before = store.read_bytes()
    SqliteConfigs(store).configs(H200)
    assert store.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, (Origin.MEASURED, Reuse.EXACT)),
        ({"driver": "580.65.06"}, (Origin.MEASURED, Reuse.EXACT)),
        ({"driver": "570.1"}, (Origin.BORROWED, Reuse.OTHER_DRIVER)),
        ({"triton": "3.5.0"}, (Origin.BORROWED, Reuse.OTHER_COMPILER)),
        ({"power_limit_w": 500}, (Origin.BORROWED, Reuse.OTHER_DRIVER)),
        ({"ptxas": "12.4.1", "driver": "570.1"}, (Origin.BORROWED, Reuse.OTHER_COMPILER)),
        ({"kernel_hash": "1111111111111111", "triton": "3.5.0"}, (Origin.BORROWED, Reuse.OTHER_SOURCE)),
        ({"device": H100}, (Origin.BORROWED, Reuse.SAME_CAPABILITY)),
        ({"device": H100, "kernel_hash": "1111111111111111"}, (Origin.BORROWED, Reuse.SAME_CAPABILITY)),
        ({"origin": Origin.BORROWED}, (Origin.BORROWED, Reuse.SAME_CAPABILITY)),
        ({"origin": Origin.PREDICTED}, (Origin.PREDICTED, None)),
        ({"origin": Origin.DEFAULT}, None),
        ({"device": H100, "origin": Origin.PREDICTED}, None),
        ({"device": device_named("a100_sxm4_80")}, None),
    ],
    ids=str,
)
def test_what_a_row_is_worth_here(
    tmp_path: Path, changes: dict[str, Any], found: tuple[Origin, Reuse | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(provenance, "power_limit_w", lambda uuid: 700)
    path = store_with(tmp_path / "store.db", best(SHAPE, config(), **changes))
    assert [(row.origin, row.reuse) for row in SqliteConfigs(path).configs(H200)] == ([] if found is None else [found])


def test_a_store_of_an_older_schema_is_read(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        (view,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'dispatch'").fetchone()
        connection.execute("DROP VIEW dispatch")
        for newer in ("environment.power_limit_w AS power_limit_w", "best.served_checksum AS checksum"):
            view = view.replace(f",\n    {newer}", "")
        connection.execute(view)
        connection.execute("UPDATE blocktune_schema SET version_num = '0002'")
    with closing(sqlite3.connect(store)) as connection:
        columns = [column[0] for column in connection.execute("SELECT * FROM dispatch").description]
    assert "power_limit_w" not in columns
    assert origins(SqliteConfigs(store)) == [Origin.MEASURED]


@pytest.mark.parametrize("changes", [{"protocol": 1}, {"protocol": 2}, {"regime": Regime.BURST}])
def test_neither_protocol_nor_regime_makes_a_measurement_worth_less(tmp_path: Path, changes: dict[str, Any]) -> None:
    winner = best(SHAPE, config())
    winner = replace(winner, environment=replace(winner.environment, **changes))
    path = store_with(tmp_path / "store.db", winner)
    exported = tmp_path / "frozen.json"
    save_text(canonical_text(frozen_document(H200, [winner])), exported)
    for source in (SqliteConfigs(path), JsonConfigs(exported)):
        assert [row.reuse for row in source.configs(H200)] == [Reuse.EXACT]


def test_of_two_regimes_the_dispatcher_takes_the_one_measured_last(tmp_path: Path) -> None:
    hot, cool = best(SHAPE, config(64)), best(SHAPE, config(128))
    cool = replace(cool, environment=replace(cool.environment, regime=Regime.BURST))
    for number, (first, last) in enumerate([(hot, cool), (cool, hot)]):
        later = replace(last, created_at=first.created_at + timedelta(hours=1))
        path = store_with(tmp_path / f"{number}.db", first, later)
        assert [row.config for row in SqliteConfigs(path).configs(H200)] == [last.config]


def test_rows_of_h100_and_h200_never_mix(tmp_path: Path) -> None:
    path = store_with(tmp_path / "store.db", best(SHAPE, config(64), device=H100), best(SHAPE, config(128)))
    for device, own in ((H200, config(128)), (H100, config(64))):
        table = ConfigTable(SqliteConfigs(path).configs(device))
        measured, borrowed = table.of_shape(Reuse.EXACT, SHAPE), table.of_shape(Reuse.SAME_CAPABILITY, SHAPE)
        assert measured is not None
        assert borrowed is not None
        assert (measured.config, borrowed.config) == (own, config(192 - own.block_m))


def test_rows_of_this_device_come_before_those_of_others(tmp_path: Path) -> None:
    path = store_with(tmp_path / "store.db", best(SHAPE, config(64), device=H100), best(SHAPE, config(128)))
    assert [row.config.block_m for row in SqliteConfigs(path).configs(H200)] == [128, 64]


GOOD_ROW = {
    "device_key": H200.key,
    "shape": SHAPE.to_json(),
    "config": config().to_json(),
    "kernel_hash": "00000000feedbeef",
    "origin": "measured",
    "time_us": 10.0,
    "triton": "3.6.0",
    "ptxas": "12.8.93",
    "driver": "580.65.06",
}


@pytest.mark.parametrize(
    "damage",
    [
        {"shape": None},
        {"shape": "[" * 100_000},
        {"shape": SHAPE.to_json() | {"batch": -1}},
        {"shape": SHAPE.to_json() | {"extra": 1}},
        {"config": config().to_json() | {"kernel": "unknown"}},
        {"config": config().to_json() | {"ir_override": 1}},
        {"config": config().to_json() | {"block_m": 1 << 20}},
        {"config": config().to_json() | {"block_m": "64"}},
        {"config": "{"},
        {"origin": "guessed"},
        {"origin": None},
        {"time_us": float("nan")},
        {"time_us": -1.0},
        {"time_us": "10"},
        {"triton": None},
        {"power_limit_w": -1},
        {"power_limit_w": "700"},
        {"kernel_hash": b"feedbeef"},
    ],
)
def test_a_broken_row_costs_itself_and_one_warning(damage: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    rows = usable_rows([GOOD_ROW | damage, GOOD_ROW], H200, where="here")
    assert [row.config for row in rows] == [config()]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1 row(s) of here" in caplog.text


def test_results_round_trip_through_an_exported_file(store: Path, tmp_path: Path) -> None:
    with ResultStore.open(store) as opened:
        document = opened.export_json(H200)
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document))
    assert JsonConfigs(file).configs(H200) == [tuned(SHAPE, config(), reuse=Reuse.EXACT)]
    assert origins(JsonConfigs(file), H100) == [Origin.BORROWED]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "blocktune-results", "schema": 1}', '{"format": 1}'])
def test_a_file_that_holds_no_results_is_a_store_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(StoreError, match="results"):
        JsonConfigs(file).configs(H200)


def test_the_shipped_results_can_be_read() -> None:
    JsonConfigs().configs(H200)


def test_a_broken_layer_leaves_the_others_standing() -> None:
    rows, problems = read_source(LayeredConfigs((BrokenSource(), ListSource([tuned(SHAPE, config())]))), H200)
    assert rows == [tuned(SHAPE, config())]
    assert problems == ["BrokenSource cannot be read: OSError: no such disk"]


def test_layers_log_their_problems_when_read_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert LayeredConfigs((BrokenSource(),)).configs(H200) == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("named", [None, "{tmp}/a.db", "sqlite:////{tmp}/a.db", "~/a.db"])
def test_reader_and_store_agree_where_the_users_store_is(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blocktune.db.tables.location import StoreTarget

    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    if named is not None:
        monkeypatch.setenv("BLOCKTUNE_DB", named.format(tmp=str(tmp_path).lstrip("/")).replace("{", ""))
    assert Path(os.path.abspath(user_store_path())) == StoreTarget.of(None).path


def test_reader_and_store_agree_on_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert user_store_path() == default_store_path()


@pytest.mark.parametrize("value", ["", ".", "data", "../data"])
def test_no_variable_leads_the_reader_into_the_working_directory(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLOCKTUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", value)
    monkeypatch.chdir(tmp_path)
    assert user_store_path() == Path.home() / ".local" / "share" / "blocktune" / "blocktune.db" == default_store_path()


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    file = tmp_path / "frozen.json"
    save_text(canonical_text(frozen_document(H200, [best(SHAPE, config())])), file)
    return file


def test_the_variable_may_name_a_frozen_file(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(frozen))
    assert UserConfigs().configs(H200) == [tuned(SHAPE, config(), reuse=Reuse.EXACT)]
    assert read_source(default_source(), H200)[0][0] == tuned(SHAPE, config(), reuse=Reuse.EXACT)
    with pytest.raises(StoreError, match="results file"):
        user_store_path()  # what only a store can hold is not looked for in it
    with pytest.raises(UsageError, match="results file by its name"):
        ResultStore.open()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is missing"),
        ("{", "holds JSON"),
        ("[]", "format and schema"),
        ("[" * 100_000, "holds JSON"),
        ("changed", "changed after it was frozen"),
        ("NaN", "changed after it was frozen"),
        ("folder", "Is a directory"),
        ("pipe", "is no file"),
        ("", "is empty"),
        ("binary", "cannot be read"),
    ],
)
def test_a_frozen_file_that_cannot_be_read_costs_one_problem_that_names_it(
    text: str | None, message: str, frozen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", str(frozen))
    sealed = frozen.read_text()
    frozen.unlink()
    if text == "folder":
        frozen.mkdir()
    elif text == "pipe":
        os.mkfifo(frozen)
    elif text == "binary":
        frozen.write_bytes(b"\xff\xfe\x00")
    elif text is not None:
        time_us = f'"time_us":{"NaN" if text == "NaN" else 11}'
        frozen.write_text(sealed.replace('"time_us":10.0', time_us) if text in ("changed", "NaN") else text)
    rows, problems = read_source(LayeredConfigs((UserConfigs(), ListSource([tuned(SHAPE, config(64))]))), H200)
    assert [row.config for row in rows] == [config(64)]
    assert len(problems) == 1
    assert message in problems[0]
    assert str(frozen) in problems[0]


def test_a_server_is_not_read_and_its_password_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTUNE_DB", "postgresql://me:secret@host/db")
    with pytest.raises(StoreError, match="SQLite files only") as caught:
        SqliteConfigs().configs(H200)
    assert "secret" not in str(caught.value)


# --- stores in bad order: an answer in time, and the right error ---


def answer(path: Path, in_time: float = ANSWER_SECONDS) -> tuple[Exception | None, float]:
    """The reader's error and the fastest of many attempts, since other programs may take the processor away; the first
    that is fast enough is the last."""
    fastest, error = math.inf, None
    for _ in range(40):
        start = time.perf_counter()
        try:
            SqliteConfigs(path).configs(H200)
        except StoreError as caught:
            error = caught
        fastest = min(fastest, time.perf_counter() - start)
        if fastest < in_time:
            break
    return error, fastest


@pytest.mark.parametrize(("damage", "error"), BAD_STORES)
def test_a_bad_store_is_answered_in_time(store: Path, damage: Callable[[Path], None], error: type[StoreError]) -> None:
    damage(store)
    caught, seconds = answer(store)
    assert type(caught) is error
    assert str(store) in str(caught)
    assert seconds < ANSWER_SECONDS


def test_random_damage_never_raises_anything_but_a_store_error(store: Path, tmp_path: Path) -> None:
    sound, dice = store.read_bytes(), random.Random(1)
    for _ in range(100):
        content = bytearray(sound)
        for _ in range(dice.choice([1, 10, 200])):
            content[dice.randrange(len(content))] = dice.randrange(256)
        damaged = tmp_path / "damaged.db"
        damaged.write_bytes(content)
        rows, problems = read_source(SqliteConfigs(damaged), H200)
        assert len(rows) <= 1
        unexpected = [problem for problem in problems if problem.startswith("SqliteConfigs cannot be read")]
        assert unexpected == []


def test_a_locked_store_is_asked_until_its_time_is_over(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "READ_SECONDS", 0.1)
    with held_exclusively(store):
        caught, seconds = answer(store, in_time=0.1 + ANSWER_SECONDS)
    assert type(caught) is StoreLockedError
    assert 2 * store_file.BUSY_SECONDS < seconds < 0.1 + ANSWER_SECONDS  # more than once


def test_a_store_that_is_unlocked_meanwhile_is_read(store: Path) -> None:
    with held_exclusively(store):
        reading = BackgroundRead(lambda: SqliteConfigs(store).configs(H200), lambda: None)
        assert reading.value(0.1) is None
    rows = reading.value(store_file.READ_SECONDS)
    assert rows is not None
    assert [row.time_us for row in rows] == [10.0]


def read_as_nobody(path: Path) -> str:
    """What a process that may not write the store's directory reads: the number of rows, or the error."""
    code = (
        "import os, sys; from pathlib import Path; from blocktune.kernels.stored.store_file import SqliteRows\n"
        "from blocktune.kernels.hardware.device import device_named; device = device_named('h200')\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: print(len(SqliteRows(Path(sys.argv[1])).read(device)))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


def test_a_store_on_read_only_media_is_read(open_directory: Path) -> None:
    path = store_with(open_directory / "store.db", best(SHAPE, config()))
    path.chmod(0o444)
    open_directory.chmod(0o555)
    assert read_as_nobody(path) == "1"


def test_rows_that_wait_in_a_log_on_read_only_media_are_not_passed_over_in_silence(open_directory: Path) -> None:
    path = store_with(open_directory / "store.db", best(SHAPE, config()))
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute("UPDATE best SET time_us = 11, served_checksum = NULL")
        for name in ("copy.db", "copy.db-wal"):  # as a backup taken while the store was in use
            shutil.copy(open_directory / name.replace("copy", "store"), open_directory / name)
    for file in open_directory.iterdir():
        file.chmod(0o444)
    open_directory.chmod(0o555)
    assert read_as_nobody(open_directory / "copy.db").startswith("StoreError")


def test_a_reader_sees_what_a_writer_has_committed_meanwhile(store: Path) -> None:
    with closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE best SET time_us = 11, served_checksum = NULL")
        assert [row.time_us for row in SqliteConfigs(store).configs(H200)] == [10.0]
        writer.execute("COMMIT")
        assert [row.time_us for row in SqliteConfigs(store).configs(H200)] == [11.0]
