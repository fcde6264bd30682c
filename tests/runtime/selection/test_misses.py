"""What is counted as missed, the file it is kept in, and the work that is made of it."""

import fcntl
import logging
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from blocktune.kernels import registry
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import Origin
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.dispatch import obstacles, resolver
from blocktune.runtime.dispatch.dispatcher import Dispatcher
from blocktune.runtime.selection import misses
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.ladder import Rung
from blocktune.runtime.selection.miss_file import append_misses, read_misses
from blocktune.runtime.selection.misses import MissLog, miss_of, work_of
from blocktune.runtime.store_reader.provenance import Reuse
from tests.support.fakes.dispatch_fakes import H200, ListSource, PlainKernel, config, shape_like, tensors, tuned
from tests.support.suite import warm_python
from tools import python

pytestmark = pytest.mark.triton_free

SHORT, LONG = shape_like(128), shape_like(2048)
SHORT_MISS, LONG_MISS = (H200.key, SHORT), (H200.key, LONG)


@dataclass
class Plan:
    """What a log sees of a plan."""

    explanation: Explanation
    calls: int = 0


def plan(shape: AttentionShape | None = SHORT, rung: Rung = Rung.DEFAULT, device: str | None = H200.key) -> Plan:
    return Plan(Explanation(rung=rung, reason="", shape=shape, config=config(), device=device))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "misses.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[MissLog]:
    made = MissLog(path)
    yield made
    made.close()


# --- what counts ---


@pytest.mark.parametrize("rung", Rung)
def test_only_measurements_made_here_are_no_misses(rung: Rung) -> None:
    served = rung in (Rung.EXACT, Rung.OTHER_DRIVER)
    assert miss_of(plan(rung=rung).explanation) == (None if served else SHORT_MISS)


def test_what_was_asked_about_no_device_or_shape_is_no_miss() -> None:
    assert miss_of(plan(device=None).explanation) is None
    assert miss_of(plan(shape=None).explanation) is None


def test_every_call_is_counted_once(log: MissLog, path: Path) -> None:
    short, long = plan(SHORT), plan(LONG)
    log.watch(short)
    log.watch(long)
    for calls in (3, 3, 10):
        short.calls = calls
        log.write()
    long.calls = 1
    log.close()
    assert read_misses(path) == {SHORT_MISS: 10, LONG_MISS: 1}


def test_plans_that_are_let_go_keep_their_counts(log: MissLog, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_WATCHED", 2)
    for _ in range(5):
        new = plan()
        log.watch(new)
        new.calls = 2
    assert len(log._plans) == 2
    log.write()
    assert read_misses(path) == {SHORT_MISS: 10}


def test_a_thread_writes_before_the_process_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "FIRST_SECONDS", 0.01)
    log, watched = MissLog(path), plan()
    watched.calls = 7
    log.watch(watched)
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    log.close()
    assert read_misses(path) == {SHORT_MISS: 7}
    assert log._thread is not None
    assert not log._thread.is_alive()


def test_a_process_without_a_thread_to_spare_writes_at_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log, watched = MissLog(path), plan()
    log.watch(watched)
    watched.calls = 2
    log.close()
    assert read_misses(path) == {SHORT_MISS: 2}


def test_watching_never_waits_for_the_file(log: MissLog, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, go_on = threading.Event(), threading.Event()

    def stuck(path: Path, counts: object) -> None:
        writes.set()
        go_on.wait(100)

    monkeypatch.setattr(misses, "append_misses", stuck)
    monkeypatch.setattr(misses, "FIRST_SECONDS", 0.0)
    first = plan()
    first.calls = 1
    log.watch(first)
    assert writes.wait(60)
    began = time.perf_counter()
    log.watch(plan())
    waited = time.perf_counter() - began
    go_on.set()
    assert waited < 30  # the file waits 100 s


def test_a_place_that_cannot_be_written_ends_the_counting_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").touch()  # a file where the directory would be
    log, watched = MissLog(tmp_path / "state" / "misses.jsonl"), plan()
    for calls in (1, 2, 3):
        watched.calls = calls
        log.watch(watched)
        log.write()
    log.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(tmp_path) in caplog.text


def test_a_file_that_another_process_writes_is_written_next_time(log: MissLog, path: Path) -> None:
    watched = plan()
    watched.calls = 4
    log.watch(watched)
    append_misses(path, {LONG_MISS: 1})
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        log.write()
    assert read_misses(path) == {LONG_MISS: 1}
    log.write()
    assert read_misses(path) == {LONG_MISS: 1, SHORT_MISS: 4}


# --- the processes of users ---


def in_a_process(script: str, path: Path) -> None:
    """Runs the script with a watched plan `plan`, as a program that imports blocktune."""
    begin = """
        import os, time
        from tests.runtime.selection.test_misses import plan as make
        from blocktune.runtime.selection import misses
        plan = make()
        misses.watch(plan)
        """
    code = textwrap.dedent(begin) + textwrap.dedent(script)
    warm_python.run(python(code), env=os.environ | {"BLOCKTUNE_MISSES": str(path)}, check=True, timeout=60)


def test_the_end_of_a_process_writes_what_is_left_and_a_forked_child_counts_nothing_twice(path: Path) -> None:
    in_a_process(
        """
        plan.calls = 5
        child = os.fork()
        if child == 0:
            plan.calls += 1000  # not the child's own plan
            own = make()
            misses.watch(own)
            own.calls = 1
            raise SystemExit
        assert os.waitpid(child, 0)[1] == 0
        """,
        path,
    )
    assert read_misses(path) == {SHORT_MISS: 6}


# --- work ---


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", {"plain": PlainKernel()})


@pytest.mark.usefixtures("kernel")
def test_a_dispatcher_counts_what_it_misses(log: MissLog, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "_log", lambda: log)
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    for strict in (False, True):
        dispatcher = Dispatcher(ListSource([tuned(LONG, config())]), strict=strict)
        for shape, calls in ((SHORT, 3), (LONG, 2)):
            for _ in range(calls):
                dispatcher(*tensors(shape))
    log.write()
    assert read_misses(path) == {SHORT_MISS: 6}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("place", ["~nobody-of-this-name/m.jsonl", "m" * 300, "/", "/dev/null", "/dev/null/m"])
def test_no_place_of_the_file_raises_into_a_call(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKTUNE_MISSES", place)
    monkeypatch.setattr(obstacles, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(resolver, "current_device", lambda index: H200)
    of_this_test = cache(misses._new_log)
    monkeypatch.setattr(misses, "_log", of_this_test)
    dispatcher = Dispatcher(ListSource())
    for _ in range(3):
        dispatcher(*tensors(SHORT))
    of_this_test().close()
    dispatcher(*tensors(SHORT))
    assert dispatcher.misses() == {SHORT: 4}
    assert sum("Misses are not counted" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.usefixtures("kernel")
def test_the_most_frequent_misses_of_this_device_come_first() -> None:
    strange = shape_like(head_dim=256)  # which no kernel computes
    counted = {
        SHORT_MISS: 5,
        LONG_MISS: 50,
        (H200.key, strange): 1000,
        (device_named("h100_sxm5").key, shape_like(4096)): 1000,
    }
    assert work_of(H200, ListSource(), counted) == [LONG, SHORT]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("reuse", "left"),
    [(Reuse.EXACT, []), (Reuse.OTHER_DRIVER, []), (Reuse.OTHER_COMPILER, [SHORT]), (Reuse.SAME_CAPABILITY, [SHORT])],
)
def test_what_was_measured_meanwhile_is_no_work(reuse: Reuse, left: list[AttentionShape]) -> None:
    rows = [tuned(SHORT, config(), Origin.BORROWED, reuse), tuned(LONG, config(), Origin.PREDICTED)]
    assert work_of(H200, ListSource(rows), {SHORT_MISS: 1}) == left
