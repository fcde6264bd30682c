"""The dispatcher above a store that fails: every call gets its attention, in time, with one warning."""

import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blocktune.kernels.hardware.nvml import driver_version
from blocktune.runtime.dispatch import resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.dispatch.torch_attention import scaled_dot_product_attention
from blocktune.runtime.selection import misses
from blocktune.runtime.selection.ladder import Rung
from blocktune.runtime.selection.misses import MissLog
from blocktune.runtime.store_reader import store_file
from blocktune.runtime.store_reader.background import CALL_SECONDS
from blocktune.runtime.store_reader.provenance import ptxas_version, triton_version
from blocktune.runtime.store_reader.sources import ConfigSource, JsonConfigs, LayeredConfigs, SqliteConfigs, read_source
from tests.support.fakes.dispatch_fakes import (
    H200,
    ListSource,
    PlainKernel,
    best,
    config,
    pretend_h200,
    shape_like,
    store_with,
    tensors,
)
from tests.support.stores.bad_stores import BAD_STORES, held_exclusively, random_bytes
from tests.support.suite import warm_python

pytestmark = pytest.mark.triton_free

SHAPE = shape_like(32)
LOST_SECONDS = 0.05
"""What a store may cost a call."""


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    """The CPU as an H200 with one kernel, in a process that knows its software by now."""
    kernel = pretend_h200(monkeypatch)
    assert triton_version() + ptxas_version(90) + driver_version() != ""
    return kernel


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return store_with(tmp_path / "store.db", best(SHAPE, config()))


def assert_right(dispatcher: Dispatcher) -> None:
    arguments = tensors(SHAPE)
    torch.testing.assert_close(dispatcher(*arguments), scaled_dot_product_attention(*arguments))


def seconds_of_first_call(source: ConfigSource, wanted: float = 0.0) -> float:
    """The fastest first call of many dispatchers, since other programs may take the processor away; the first that is
    as fast as wanted ends the search."""
    arguments, fastest = tensors(SHAPE), math.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolver, "CALL_SECONDS", CALL_SECONDS)
        for _ in range(40 if wanted else 3):
            dispatcher = Dispatcher(source)
            start = time.perf_counter()
            dispatcher(*arguments)
            fastest = min(fastest, time.perf_counter() - start)
            if fastest < wanted:
                break
    return fastest


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("damage", [damage for damage, _ in BAD_STORES])
def test_a_bad_store_costs_one_warning_and_little_time(
    store: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    allowed = seconds_of_first_call(ListSource()) + LOST_SECONDS
    damage(store)
    assert seconds_of_first_call(SqliteConfigs(store), allowed) < allowed
    caplog.clear()
    dispatcher = Dispatcher(SqliteConfigs(store))
    for _ in range(20):
        assert_right(dispatcher)
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [logging.WARNING]
    explanation = dispatcher.explain(*tensors(SHAPE))
    assert explanation.rung is Rung.DEFAULT
    assert len(explanation.warnings) == 1
    assert str(store) in explanation.warnings[0]
    assert dispatcher.misses() == {SHAPE: 20}


@pytest.mark.usefixtures("one_thread")
def test_a_lock_that_another_process_keeps_costs_little_time(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "READ_SECONDS", 0.5)
    dispatcher = Dispatcher(SqliteConfigs(store))
    allowed = seconds_of_first_call(ListSource()) + LOST_SECONDS
    with held_exclusively(store):  # for as long as it likes: no call waits for it
        assert seconds_of_first_call(SqliteConfigs(store), allowed) < allowed
        assert_right(dispatcher)
        assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.DEFAULT
    dispatcher.reload()
    assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.EXACT


def test_a_store_whose_lock_is_let_go_serves_without_a_reload(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "CALL_SECONDS", CALL_SECONDS)
    dispatcher = Dispatcher(SqliteConfigs(store))
    with held_exclusively(store):
        assert_right(dispatcher)
        assert dispatcher.misses() == {SHAPE: 1}
    assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.EXACT


def test_results_of_the_package_stand_in_for_a_bad_store(store: Path) -> None:
    random_bytes(store)
    shipped = ListSource(SqliteConfigs(store_with(store.with_name("shipped.db"), best(SHAPE, config()))).configs(H200))
    explanation = Dispatcher(LayeredConfigs((SqliteConfigs(store), shipped))).explain(*tensors(SHAPE))
    assert (explanation.rung, len(explanation.warnings)) == (Rung.EXACT, 1)


def test_a_store_that_is_deleted_is_missed_at_the_next_reload(store: Path) -> None:
    dispatcher = Dispatcher(SqliteConfigs(store))
    assert_right(dispatcher)
    store.unlink()
    assert_right(dispatcher)
    assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.EXACT  # as read before
    dispatcher.reload()
    assert_right(dispatcher)
    assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.DEFAULT


def test_a_file_that_comes_and_goes_while_it_is_read_gives_all_or_nothing(store: Path) -> None:
    copy, done = store.with_name("copy.db"), threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            shutil.copyfile(store, copy)  # half a file, for a moment
            copy.unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(100):
            rows, problems = read_source(SqliteConfigs(copy), H200)
            assert len(rows) + len(problems) == 1
            assert not any(problem.startswith("SqliteConfigs cannot be read") for problem in problems)
    finally:
        done.set()
        thread.join()


def test_results_that_are_cut_off_cost_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text('{"format": "blocktune-results", "schema": 1, "bests": [')
    explanation = Dispatcher(JsonConfigs(file)).explain(*tensors(SHAPE))
    assert (explanation.rung, len(explanation.warnings)) == (Rung.DEFAULT, 1)


def test_a_full_disk_stops_the_counting_of_misses_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = MissLog(Path("/dev/full"))
    monkeypatch.setattr(misses, "_log", lambda: log)
    dispatcher = Dispatcher(ListSource())
    for _ in range(3):
        assert_right(dispatcher)
        log.write()
    log.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Misses are not counted" in caplog.text


@pytest.mark.parametrize("text", [None, '{"format": "blocktune-results"'])
def test_a_file_that_the_variable_names_and_nobody_can_read_costs_one_warning(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "frozen.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("BLOCKTUNE_DB", str(file))
    dispatcher = Dispatcher()
    for _ in range(3):
        assert_right(dispatcher)
    (warning,) = [record.getMessage() for record in caplog.records if "frozen.json" in record.getMessage()]
    assert str(file) in warning


def test_a_store_of_another_user_is_a_store_error(open_directory: Path) -> None:
    path = store_with(open_directory / "store.db", best(SHAPE, config()))
    path.chmod(0o000 if os.geteuid() else 0o600)
    code = (
        "import os, sys; from pathlib import Path; from blocktune.runtime.store_reader.sources import SqliteConfigs, "
        "read_source\n"
        "import blocktune.runtime.store_reader.store_file\n"  # while the interpreter's own files can be read
        "from blocktune.kernels.hardware.device import device_named\n"
        "device = device_named('h200')\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(read_source(SqliteConfigs(Path(sys.argv[1])), device))"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    told = warm_python.run(command, check=True, cwd="/").stdout
    assert told.startswith("([], ['The store ")
