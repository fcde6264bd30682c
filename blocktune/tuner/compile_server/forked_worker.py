"""A worker that is forked from the process which has imported what it compiles."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterable
from typing import Any, Protocol

from blocktune.tuner.compile.answers import die_with_parent
from blocktune.tuner.compile.child_process import ErrorFile
from blocktune.tuner.compile.diagnostics import with_diagnostics
from blocktune.tuner.compile_server.jobs import answer_to

_CHUNK = 1 << 16


class Closable(Protocol):
    """A file or a socket."""

    def close(self) -> None:
        """Close it in this process."""


class ForkedWorker:
    """A process of its own session that does one job after another, so that it dies with the compilers that it starts.

    job: what it does now. deadline: when that must be done. is_old: it was forked before the latest import. errors:
    what it prints.

    Args:
        private: what this process alone may hold open, such as the channels of other workers: the end of one is seen
            when its last holder closes it.
    """

    def __init__(self, private: Iterable[Closable]) -> None:
        self.channel, theirs = socket.socketpair()
        self.job: dict[str, Any] | None = None
        self.deadline, self.is_old = 0.0, False
        self._unread = b""
        self.errors = ErrorFile()
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for each in (*private, self.channel):
                each.close()
            _work(theirs, self.errors.fileno(), server)
        theirs.close()

    def take(self, job: dict[str, Any]) -> None:
        """Give it a job; it has none."""
        self.errors.forget()
        self.job, self.deadline = job, time.monotonic() + job["timeout_s"]
        with contextlib.suppress(BrokenPipeError):  # it has died: `answer` says so
            self.channel.sendall(json.dumps(job).encode() + b"\n")

    def answer(self) -> dict[str, Any] | None:
        """Return what it says, which ends its job: empty while that is not whole, None if it has died."""
        try:
            data = self.channel.recv(_CHUNK)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        self._unread += data
        if b"\n" not in self._unread:
            return {}
        assert self.job is not None
        line, _, self._unread = self._unread.partition(b"\n")
        found = {"id": self.job["id"]} | with_diagnostics(json.loads(line), self.errors.words())
        self.job = None
        return found

    def is_overdue(self) -> bool:
        """Return whether its job has taken longer than it may."""
        return self.job is not None and time.monotonic() >= self.deadline

    def end(self) -> int:
        """Kill it with all that it has started; return the signal by which it ended, 0 where it had ended itself."""
        for kill in (os.killpg, os.kill):  # a worker that has only just been forked has no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.channel.close()
        self.errors.close()
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _work(channel: socket.socket, stderr: int, server: int) -> None:
    """Do jobs until there are no more; never returns."""
    try:
        os.setsid()
        die_with_parent(server)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for standard in (1, 2):
            os.dup2(stderr, standard)
        with channel.makefile("r", encoding="utf-8") as jobs:
            for line in jobs:
                answer = answer_to(json.loads(line))
                channel.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)
