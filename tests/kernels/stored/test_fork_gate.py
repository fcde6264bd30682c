"""A fork waits for the connections of other threads, briefly, and for none of its own."""

import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from blocktune.kernels.stored import fork_gate
from blocktune.kernels.stored.background import CALL_SECONDS, MAX_SECONDS, BackgroundRead
from blocktune.kernels.stored.fork_gate import ForkGate, GatedConnection, gate

pytestmark = pytest.mark.triton_free


def in_another_thread(gate: ForkGate, seconds: float) -> threading.Thread:
    """A thread that has entered the gate and stays inside so long."""
    entered = threading.Event()

    def work() -> None:
        token = gate.enter()
        entered.set()
        time.sleep(seconds)
        gate.leave(token)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(10)
    return thread


def closed_for(gate: ForkGate) -> float:
    """Seconds that a fork would wait."""
    began = time.monotonic()
    gate.close()
    waited = time.monotonic() - began
    gate.reopen()
    return waited


def test_a_fork_waits_for_other_threads_and_not_for_its_own() -> None:
    own = ForkGate()
    token = own.enter()
    assert closed_for(own) < 0.1
    thread = in_another_thread(own, 0.3)
    assert 0.1 < closed_for(own) < fork_gate.MAX_SECONDS
    own.leave(token)
    thread.join()


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_gate, "MAX_SECONDS", 0.1)
    own = ForkGate()
    thread = in_another_thread(own, 0.6)
    assert closed_for(own) < 0.4
    thread.join()


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
    assert entered.wait(10)
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
        from blocktune.kernels.stored.fork_gate import GatedConnection
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "0", result.stderr


def test_a_call_does_not_wait_for_a_fork_that_waits(tmp_path: Path) -> None:
    """The fork waits for a writer's connection, the thread that reads configs for the fork, and the call for nobody."""
    path = tmp_path / "a.db"

    def read() -> str:
        with closing(sqlite3.connect(path, factory=GatedConnection)):
            return "read"

    writer = in_another_thread(gate, 2.5)
    forker = threading.Thread(target=lambda: (gate.close(), gate.reopen()))
    forker.start()
    while not gate.is_closed:
        time.sleep(0.001)
    reading = BackgroundRead(read, lambda: None)
    began = time.monotonic()
    assert reading.value(CALL_SECONDS) is None
    assert time.monotonic() - began < 2
    assert reading.value(MAX_SECONDS) == "read"
    for thread in (writer, forker):
        thread.join()
