"""A fork waits for the connections of other threads, briefly, and for none of its own."""

import sqlite3
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from blocktune.runtime.store_reader import fork_gate
from blocktune.runtime.store_reader.background import CALL_SECONDS, MAX_SECONDS, BackgroundRead
from blocktune.runtime.store_reader.fork_gate import ForkGate, GatedConnection, gate
from tests.support.suite import warm_python

pytestmark = pytest.mark.triton_free


@contextmanager
def another_thread_inside(gate: ForkGate) -> Iterator[threading.Event]:
    """Yield what lets a thread go that has entered the gate."""
    entered, go = threading.Event(), threading.Event()

    def work() -> None:
        token = gate.enter()
        entered.set()
        go.wait(100)
        gate.leave(token)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    try:
        yield go
    finally:
        go.set()
        thread.join()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forks wait longer than any stall of a busy machine."""
    monkeypatch.setattr(fork_gate, "MAX_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_fork_waits_for_other_threads_and_not_for_its_own() -> None:
    own, has_waited, inside = ForkGate(), threading.Event(), [True]
    own.leave(own.enter())
    token = own.enter()
    own.close()  # does not wait for the connection of this thread
    own.reopen()
    own.leave(token)

    def fork() -> None:
        own.close()
        inside.append(bool(own._open))
        own.reopen()
        has_waited.set()

    with another_thread_inside(own) as go:
        forker = threading.Thread(target=fork)
        forker.start()
        assert not has_waited.wait(0.1)
        go.set()
        assert has_waited.wait(30)
    forker.join()
    assert inside == [True, False]


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_gate, "MAX_SECONDS", 0.1)
    own = ForkGate()
    with another_thread_inside(own):
        own.close()
        assert own._open
        own.reopen()


def test_connections_wait_while_a_fork_happens() -> None:
    own, entered = ForkGate(), threading.Event()

    def work() -> None:
        own.leave(own.enter())
        entered.set()

    own.close()
    thread = threading.Thread(target=work)
    thread.start()
    assert not entered.wait(0.1)
    own.reopen()
    assert entered.wait(60)
    thread.join()


def test_a_connection_is_counted_until_it_is_closed(tmp_path: Path) -> None:
    me = threading.get_ident()
    with closing(sqlite3.connect(tmp_path / "a.db", factory=GatedConnection)) as connection:
        assert gate._open == {me: 1}
        with closing(sqlite3.connect(tmp_path / "b.db", factory=GatedConnection)):
            assert gate._open == {me: 2}
        connection.close()
        connection.close()
        assert gate._open == {}
    with pytest.raises(sqlite3.OperationalError):
        sqlite3.connect(tmp_path / "no" / "a.db", factory=GatedConnection)
    assert gate._open == {}


def test_forked_children_can_use_a_file_that_other_threads_write(tmp_path: Path) -> None:
    """Without the gate nearly every child waits until it gives up."""
    script = """
        import os, sqlite3, sys, threading, traceback, warnings
        from contextlib import closing
        from blocktune.runtime.store_reader.fork_gate import GatedConnection
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks beside threads
        def connect(timeout):
            return closing(sqlite3.connect(
                sys.argv[1], timeout=timeout, isolation_level=None, factory=GatedConnection
            ))
        def write(timeout):
            with connect(timeout) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO t VALUES (1)")
                connection.execute("COMMIT")
        with connect(30) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE t (n)")
        done = threading.Event()
        def work():
            while not done.wait(0.002):
                write(30)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        failed = 0
        for _ in range(10):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    write(10)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            failed += os.waitpid(child, 0)[1] != 0
        done.set()
        for thread in threads:
            thread.join()
        print(failed)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), str(tmp_path / "shared.db")]
    result = warm_python.run(command, timeout=120)
    assert result.stdout.strip() == "0", result.stderr


@pytest.mark.usefixtures("patient")
def test_a_call_does_not_wait_for_a_fork_that_waits(tmp_path: Path) -> None:
    """The fork waits for a writer's connection, the thread that reads configs for the fork, and the call for nobody."""
    path = tmp_path / "a.db"

    def read() -> str:
        with closing(sqlite3.connect(path, factory=GatedConnection)):
            return "read"

    forker = threading.Thread(target=lambda: (gate.close(), gate.reopen()))
    with another_thread_inside(gate) as go:
        forker.start()
        while not gate.is_closed:
            time.sleep(0.001)
        reading = BackgroundRead(read, lambda: None)
        began = time.monotonic()
        assert reading.value(CALL_SECONDS) is None
        assert time.monotonic() - began < 30
        go.set()
        assert reading.value(MAX_SECONDS) == "read"
    forker.join()
