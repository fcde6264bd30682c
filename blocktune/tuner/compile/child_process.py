"""A child process that can always be killed, and takes everything that it started with it."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

STDERR_TAIL = 1500
_CHUNK = 1 << 16


class ChildLostError(Exception):
    """The child gave no answer; `last_words` is the end of what it printed on its standard error."""

    def __init__(self, message: str, last_words: str = "") -> None:
        super().__init__(message)
        self.last_words = last_words


class ChildDiedError(ChildLostError):
    """The child ended without an answer, by the signal `signum`, or by itself, which is 0. The message says how."""

    def __init__(self, message: str, last_words: str = "", signum: int = 0) -> None:
        super().__init__(message, last_words)
        self.signum = signum


class ChildTimeoutError(ChildLostError):
    """The child did not answer in time; it still runs."""


class ErrorFile:
    """A file that takes the standard error of a child while the parent reads it."""

    def __init__(self) -> None:
        # it lives as long as the child, whose writes must not follow the place where this process reads
        self._file: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115

    def fileno(self) -> int:
        return self._file.fileno()

    def forget(self) -> None:
        """Drop what was printed."""
        self._file.truncate(0)

    def words(self) -> str:
        """Return all that was printed since `forget`."""
        self._file.seek(0)
        return self._file.read().decode(errors="replace")

    def last_words(self) -> str:
        """Return the end of what was printed."""
        self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, self._file.tell() - STDERR_TAIL))
        return self._file.read().decode(errors="replace").strip()

    def close(self) -> None:
        self._file.close()


class Child:
    """A process in a process group of its own that answers JSON lines on its standard output.

    It is started by `Popen`, never by fork, so it inherits no CUDA context and runs none of the user's script. Kernel
    compilers that it starts are in its group and die with it; Ctrl-C does not reach it. One thread that outlives the
    child starts it and talks to it, since Linux ties a parent-death signal to the thread; any thread may `kill` it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self.errors = ErrorFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.fileno(),
            env=dict(environment),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._reaping = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message.

        Raises:
            ChildDiedError: the child has ended.
        """
        try:
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._obituary() from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ChildDiedError: the child ended instead.
            ChildTimeoutError: nothing came for `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ChildTimeoutError(f"no answer within {timeout_s:.0f} s", self.errors.last_words())
            data = os.read(self._output.fileno(), _CHUNK)
            if not data:
                raise self._obituary()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone, not to what it started; harmless after its end. Another thread may wait in
        `receive` meanwhile."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the child and its whole group. Another thread may talk to it meanwhile; harmless when repeated."""
        with self._reaping:  # once it is reaped, its number may be another process's
            if self._process.returncode is None:
                self._kill_group()

    def end(self) -> None:
        """Kill the child and its group if they still run, wait for it and free its pipes; harmless when repeated."""
        self.kill()
        self._wait()
        self._selector.close()
        for stream in (self._output, self.errors):
            stream.close()
        with contextlib.suppress(BrokenPipeError):  # a command that was not sent, and has no reader now
            self._input.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> int:
        with self._reaping:
            return self._process.wait()

    def _obituary(self) -> ChildDiedError:
        self.kill()  # what it started may outlive it
        code, said = self._wait(), self.errors.last_words()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return ChildDiedError(f"the worker process ended: {how}. {said}".strip(), said, max(0, -code))
