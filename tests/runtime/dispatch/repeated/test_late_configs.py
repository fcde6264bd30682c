"""A source that is slow to read: no call waits for it, and nothing of it is lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.values.shape import Causal
from blocktune.runtime.dispatch import resolver, sourced_engine
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.selection.ladder import Rung
from blocktune.runtime.store_reader.background import CALL_SECONDS
from blocktune.runtime.store_reader.sources import LayeredConfigs, SqliteConfigs
from blocktune.runtime.store_reader.tuned_config import TunedConfig
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
    tuned,
)
from tests.support.stores.large_stores import multiplied

pytestmark = pytest.mark.triton_free

SHAPE, OTHER = shape_like(32), shape_like(64)


class SlowSource:
    """A source that is a file, and answers when it is let go."""

    reads_files = True

    def __init__(self, *rows: TunedConfig) -> None:
        self.go = threading.Event()
        self.rows = list(rows)
        self.readers: list[tuple[int, str]] = []

    def configs(self, device: DeviceSpec) -> list[TunedConfig]:
        self.readers.append((os.getpid(), threading.current_thread().name))
        assert self.go.wait(60)
        return self.rows


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainKernel:
    """The CPU as an H200 with one kernel, and calls that wait as long as they do elsewhere."""
    kernel = pretend_h200(monkeypatch)
    monkeypatch.setattr(resolver, "CALL_SECONDS", CALL_SECONDS)
    return kernel


@pytest.fixture
def slow() -> Iterator[SlowSource]:
    source = SlowSource(tuned(SHAPE, config(128)), tuned(OTHER, config(128)))
    yield source
    source.go.set()


def served(dispatcher: Dispatcher, kernel: PlainKernel) -> int:
    """The block_m that a call is served with."""
    dispatcher(*tensors(SHAPE))
    return kernel.launched[-1].block_m


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def let_go(source: SlowSource, after: float = 0.2) -> None:
    threading.Timer(after, source.go.set).start()


def test_a_call_goes_on_with_the_next_layer_and_takes_the_rows_when_they_come(
    slow: SlowSource, kernel: PlainKernel
) -> None:
    below = ListSource([tuned(SHAPE, config(64))])
    dispatcher = Dispatcher(LayeredConfigs((slow, below)))
    assert served(dispatcher, kernel) == 64
    assert kernel.launched[-1] == config(64)
    slow.go.set()
    until(lambda: served(dispatcher, kernel) == 128)
    assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.EXACT
    assert slow.readers == [(os.getpid(), "blocktune-configs")]
    assert below.reads == 1


def test_one_call_waits_a_moment_and_the_others_do_not(slow: SlowSource) -> None:
    snapshot = Dispatcher(slow)._resolver.snapshot

    def seconds() -> float:
        began = time.perf_counter()
        snapshot.table(H200, CALL_SECONDS)
        return time.perf_counter() - began

    assert seconds() > CALL_SECONDS * 0.9
    assert min(seconds() for _ in range(20)) < CALL_SECONDS / 10


def test_what_is_missing_is_said_meanwhile(slow: SlowSource) -> None:
    dispatcher = Dispatcher(slow)
    dispatcher(*tensors(SHAPE))
    (known,) = dispatcher.resolver.plans.values()
    assert known.explanation.warnings == ("SlowSource is still being read, so nothing of it is used yet.",)
    slow.go.set()
    assert dispatcher.explain(*tensors(SHAPE)).warnings == ()


@pytest.mark.parametrize("ask", ["shape", "tensors", "device", "warmup", "strict"])
def test_who_needs_the_answer_that_stays_waits_for_it(slow: SlowSource, kernel: PlainKernel, ask: str) -> None:
    dispatcher = Dispatcher(slow, strict=ask == "strict")
    if ask != "strict":
        assert served(dispatcher, kernel) == 64
    let_go(slow)
    if ask == "shape":
        assert dispatcher.explain(SHAPE).rung is Rung.EXACT
    elif ask == "tensors":
        assert dispatcher.explain(*tensors(SHAPE)).rung is Rung.EXACT
    elif ask == "device":
        assert dispatcher.explain(SHAPE, device="h200").rung is Rung.EXACT
    elif ask == "warmup":
        assert [each.rung for each in dispatcher.warmup([SHAPE])] == [Rung.EXACT]
    assert served(dispatcher, kernel) == 128


def test_a_reload_waits_and_leaves_calls_alone_meanwhile(slow: SlowSource, kernel: PlainKernel) -> None:
    slow.go.set()
    dispatcher = Dispatcher(slow)
    dispatcher.explain(SHAPE)
    assert served(dispatcher, kernel) == 128
    slow.go.clear()
    slow.rows = [tuned(SHAPE, config(64))]
    thread = threading.Thread(target=dispatcher.reload)
    thread.start()
    until(lambda: len(slow.readers) == 2)
    assert served(dispatcher, kernel) == 128
    slow.go.set()
    thread.join(60)
    dispatcher(*tensors(SHAPE))
    assert kernel.launched[-1] == config(64)


def test_the_wait_has_an_end(slow: SlowSource, kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sourced_engine, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(resolver, "MAX_SECONDS", 0.1)
    strict = Dispatcher(slow, strict=True)
    began = time.monotonic()
    strict(*tensors(SHAPE))
    assert kernel.launched == []
    explanation = strict.explain(SHAPE)
    assert (explanation.rung, len(explanation.warnings)) == (Rung.SDPA, 1)
    assert time.monotonic() - began < 30
    slow.go.set()
    until(lambda: strict.explain(SHAPE).rung is Rung.EXACT)


def test_rows_of_a_source_that_was_replaced_meanwhile_change_nothing(slow: SlowSource, kernel: PlainKernel) -> None:
    dispatcher = Dispatcher(slow)
    assert served(dispatcher, kernel) == 64
    dispatcher.use(ListSource([tuned(SHAPE, config(64))]))
    dispatcher(*tensors(SHAPE))
    plans = dispatcher.resolver.plans
    slow.go.set()
    until(lambda: not any(thread.name == "blocktune-configs" for thread in threading.enumerate()))
    assert dispatcher.resolver.plans is plans
    assert kernel.launched[-1] == config(64)


def test_a_capture_goes_on_with_the_plans_of_before(
    slow: SlowSource, kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = Dispatcher(slow)
    arguments, asked = tensors(SHAPE), {"causal": Causal.NONE, "scale": 0.125}
    before, _ = dispatcher.attend(*arguments, lse=True, **asked)
    assert served(dispatcher, kernel) == 64
    slow.go.set()
    until(lambda: not dispatcher.resolver.plans)
    monkeypatch.setattr(resolver, "is_capturing", lambda query: True)
    launches = len(kernel.launched)
    assert served(dispatcher, kernel) == 64
    after, _ = dispatcher.attend(*arguments, lse=True, **asked)
    torch.testing.assert_close(after, before)
    assert len(kernel.launched) == launches + 2
    assert not dispatcher.resolver.plans


@pytest.mark.usefixtures("one_thread")
def test_a_forked_child_reads_for_itself_and_takes_the_rows(slow: SlowSource, kernel: PlainKernel) -> None:
    dispatcher = Dispatcher(slow)
    assert served(dispatcher, kernel) == 64
    child = os.fork()
    if child == 0:
        status = 1
        try:
            slow.go.set()
            until(lambda: served(dispatcher, kernel) == 128)
            status = 0 if dispatcher.explain(SHAPE).rung is Rung.EXACT else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert served(dispatcher, kernel) == 64  # the parent's source still waits


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Four threads that leave the interpreter to nobody of their own accord."""
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.is_set():
            number += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    yield
    done.set()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("busy_threads")
def test_a_busy_process_keeps_a_sound_store(tmp_path: Path, kernel: PlainKernel) -> None:
    path = multiplied(store_with(tmp_path / "store.db", best(SHAPE, config(128))), 300)
    dispatcher = Dispatcher(SqliteConfigs(path))
    dispatcher(*tensors(SHAPE))
    until(lambda: served(dispatcher, kernel) == 128)
    assert dispatcher.explain(SHAPE).warnings == ()


def test_a_fork_does_not_wait_for_a_long_reading(tmp_path: Path) -> None:
    path = multiplied(store_with(tmp_path / "store.db", best(SHAPE, config(128))), 5000)
    began = time.monotonic()
    Dispatcher(SqliteConfigs(path)).explain(SHAPE)
    reading, waited = time.monotonic() - began, []
    for _ in range(4):
        dispatcher = Dispatcher(SqliteConfigs(path))
        dispatcher(*tensors(SHAPE))  # is read from now on
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(0)
        waited.append(time.monotonic() - began)
        os.waitpid(child, 0)
    assert dispatcher.explain(SHAPE).rung is Rung.EXACT
    assert min(waited) < reading / 3


def test_a_store_that_is_written_meanwhile_is_read_whole(tmp_path: Path) -> None:
    path = multiplied(store_with(tmp_path / "store.db", best(SHAPE, config(128))), 500)
    done = threading.Event()

    def write() -> None:
        with ResultStore.open(path) as store:
            while not done.is_set():
                store.set_best(best(SHAPE, config(128)))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            dispatcher = Dispatcher(SqliteConfigs(path))
            assert dispatcher.explain(SHAPE).rung is Rung.EXACT
            assert len(dispatcher._resolver.snapshot.begin(H200).rows(0)[0]) == 500
    finally:
        done.set()
        writer.join()
