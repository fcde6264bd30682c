"""What the rows of a store are worth on this device, in which order they come, and what a broken one costs."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import frozen_document, save_text
from blocktune.db.records.records import Regime
from blocktune.kernels.files.json_pieces import canonical_text
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import Origin
from blocktune.runtime.selection.fallback import ConfigTable
from blocktune.runtime.store_reader import provenance
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import (
    JsonConfigs,
    SqliteConfigs,
)
from blocktune.runtime.store_reader.usable_rows import usable_rows
from tests.support.fakes.dispatch_fakes import (
    H200,
    best,
    config,
    shape_like,
    store_with,
)

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("plain_kernel")]

SHAPE = shape_like()
H100 = device_named("h100_sxm5")


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
        ({"origin": Origin.COMMUNITY}, (Origin.COMMUNITY, Reuse.OTHER_COMPILER)),
        ({"origin": Origin.COMMUNITY, "triton": "3.5.0"}, (Origin.COMMUNITY, Reuse.OTHER_COMPILER)),
        ({"origin": Origin.COMMUNITY, "device": H100}, (Origin.COMMUNITY, Reuse.SAME_CAPABILITY)),
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
        view = view.replace("\nWHERE shape.direction IS NOT NULL", "")
        connection.execute(view)
        connection.execute("UPDATE blocktune_schema SET version_num = '0002'")
    with closing(sqlite3.connect(store)) as connection:
        columns = [column[0] for column in connection.execute("SELECT * FROM dispatch").description]
    assert "power_limit_w" not in columns
    assert [row.origin for row in SqliteConfigs(store).configs(H200)] == [Origin.MEASURED]


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
