"""What is read on a thread of its own: who waits for it, who is called back, and what becomes of it at a fork."""

import sys
import textwrap
import threading
import time

import pytest

from blocktune.runtime.store_reader import background
from blocktune.runtime.store_reader.background import BackgroundRead
from tests.support.suite import warm_python

pytestmark = pytest.mark.triton_free


class Gated:
    """A reading that is done when it is let go, and who was called back."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reads = 0
        self.called = threading.Event()
        self.read = BackgroundRead(self._read, self.called.set)

    def _read(self) -> str:
        self.reads += 1
        assert self.go.wait(60)
        return "rows"


@pytest.fixture
def gated() -> Gated:
    return Gated()


def test_a_value_that_comes_in_time_is_returned_and_calls_nobody_back(gated: Gated) -> None:
    gated.go.set()
    assert gated.read.value(60) == gated.read.value(0) == "rows"
    assert not gated.called.wait(0.05)
    assert (gated.reads, gated.read.is_late) == (1, False)


def test_who_went_on_without_the_value_is_called_back(gated: Gated) -> None:
    assert gated.read.value(0.01) is None
    assert not gated.read.is_late
    gated.go.set()
    assert gated.called.wait(60)
    assert (gated.read.value(0), gated.read.is_late) == ("rows", True)


def test_the_wait_counts_from_the_beginning_of_the_reading(gated: Gated) -> None:
    began = time.monotonic()
    assert gated.read.value(0.2) is None
    assert time.monotonic() - began >= 0.2
    for _ in range(1000):
        assert gated.read.value(0.2) is None
    assert time.monotonic() - began < 100  # half of what 1,000 waits take
    gated.go.set()


def test_without_a_thread_the_value_is_read_at_once(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    gated.go.set()
    assert gated.read.value(0) == "rows"
    assert gated.read not in background._running.values()


def test_a_reading_that_raises_leaves_no_value_and_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(str(told.exc_value)))

    def broken() -> str:
        raise MemoryError("too large")

    read = BackgroundRead(broken, lambda: None)
    assert read.value(60) is None
    for thread in threading.enumerate():
        if thread.name == "blocktune-configs":
            thread.join(60)
    assert seen == ["too large"]
    assert read not in background._running.values()


def told_by(script: str) -> list[str]:
    """What a process of its own prints."""
    begin = """
        import os, sys, threading, time, warnings
        from blocktune.runtime.store_reader.background import BackgroundRead
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks beside threads
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(begin) + textwrap.dedent(script)]
    return warm_python.run(command, check=True, timeout=60).stdout.split()


@pytest.mark.parametrize("asked", [False, True])
def test_a_forked_child_reads_for_itself(*, asked: bool) -> None:
    told = told_by(
        f"""
        go, parent, called = threading.Event(), os.getpid(), threading.Event()
        def read():
            if os.getpid() == parent:
                go.wait(60)
            return os.getpid()
        value = BackgroundRead(read, called.set)
        if {asked}:
            assert value.value(0.01) is None
        else:
            value.begin()
        child = os.fork()
        if child == 0:
            assert value.value(30) == os.getpid()
            assert called.wait({30 if asked else 0.1}) is {asked}
            os._exit(0)
        go.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert value.value(30) == parent
        print("ok")
        """
    )
    assert told == ["ok"]


def test_a_fork_in_a_storm_of_readings_leaves_no_lock_held() -> None:
    told = told_by(
        """
        done = threading.Event()
        def storm():
            while not done.is_set():
                BackgroundRead(lambda: time.sleep(0.0005), lambda: None).value(0)
        threads = [threading.Thread(target=storm) for _ in range(3)]
        for thread in threads:
            thread.start()
        failed = 0
        for _ in range(30):
            child = os.fork()
            if child == 0:
                os._exit(0 if BackgroundRead(lambda: 1, lambda: None).value(20) == 1 else 1)
            failed += os.waitpid(child, 0)[1] != 0
        done.set()
        print(failed)
        """
    )
    assert told == ["0"]


def test_a_process_ends_while_something_is_read_for_ever() -> None:
    began = time.monotonic()
    told = told_by(
        """
        import atexit
        began = time.monotonic()
        atexit.register(lambda: print("waited" if time.monotonic() - began > 30 else "ended"))
        def read():
            while True:
                sum(range(1000))
        BackgroundRead(read, lambda: None).value(0.01)
        """
    )
    assert told == ["ended"]
    assert time.monotonic() - began < 50
