"""What the dispatcher reads: sources by their paths, in layers, and the files that they hold."""

import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import save_document
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.errors import StoreError, UsageError
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.store_reader.export_file import rows_in_file
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import (
    JsonConfigs,
    LayeredConfigs,
    SqliteConfigs,
    read_source,
)
from tests.support.fakes.dispatch_fakes import (
    H200,
    BrokenSource,
    ListSource,
    config,
    shape_like,
    tuned,
)

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("plain_kernel")]

SHAPE = shape_like()
H100 = device_named("h100_sxm5")


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


def test_an_export_whose_device_was_changed_is_refused(store: Path, tmp_path: Path) -> None:
    with ResultStore.open(store) as opened:
        document = opened.export_json()
    document["device"]["clock_mhz"] += 1
    save_document(document, tmp_path / "h200.json")
    with pytest.raises(StoreError, match="device_checksum"):
        JsonConfigs(tmp_path / "h200.json").configs(H200)
    del document["device_checksum"]
    save_document(document, tmp_path / "edited.json")
    assert JsonConfigs(tmp_path / "edited.json").configs(H200)


@pytest.mark.parametrize("path", [42, b"h200.json", "", object()], ids=["number", "bytes", "empty", "object"])
@pytest.mark.parametrize("source", [JsonConfigs, SqliteConfigs])
def test_a_path_that_is_none_is_refused_at_once(source: Any, path: Any) -> None:
    with pytest.raises(UsageError, match=r"A path must be text or a pathlib\.Path"):
        source(path)


@pytest.mark.parametrize(
    "source",
    ["h200.json", Path("h200.json"), JsonConfigs, 42, [ListSource([])]],
    ids=["text", "path", "class", "number", "list"],
)
def test_what_is_no_source_is_refused_at_once(source: Any) -> None:
    with pytest.raises(UsageError, match=r"A source of configs needs a method `configs\(device\)`, but got"):
        Dispatcher(source)
    with pytest.raises(UsageError, match=r"configs\(device\)"):
        LayeredConfigs((ListSource([]), source))
    dispatcher = Dispatcher(ListSource([]))
    with pytest.raises(UsageError, match=r'JsonConfigs\("h200\.json"\)'):
        dispatcher.use(source)
    assert isinstance(dispatcher.source, ListSource)


def test_layers_are_a_tuple() -> None:
    with pytest.raises(UsageError, match="`layers` must be a tuple of sources"):
        LayeredConfigs(ListSource([]))  # type: ignore[arg-type]


def test_a_winner_of_the_store_is_read_without_sqlalchemy(store: Path) -> None:
    assert SqliteConfigs(store).configs(H200) == [tuned(SHAPE, config(), reuse=Reuse.EXACT)]


def test_the_store_is_not_changed_by_reading(store: Path) -> None:
    before = store.read_bytes()
    SqliteConfigs(store).configs(H200)
    assert store.read_bytes() == before


def test_a_reader_sees_what_a_writer_has_committed_meanwhile(store: Path) -> None:
    with closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE best SET time_us = 11, served_checksum = NULL")
        assert [row.time_us for row in SqliteConfigs(store).configs(H200)] == [10.0]
        writer.execute("COMMIT")
        assert [row.time_us for row in SqliteConfigs(store).configs(H200)] == [11.0]


def test_results_round_trip_through_an_exported_file(store: Path, tmp_path: Path) -> None:
    with ResultStore.open(store) as opened:
        document = opened.export_json(H200)
    file = tmp_path / "results.json"
    file.write_text(json.dumps(document))
    assert JsonConfigs(file).configs(H200) == [tuned(SHAPE, config(), reuse=Reuse.EXACT)]
    assert [row.origin for row in JsonConfigs(file).configs(H100)] == [Origin.BORROWED]


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
