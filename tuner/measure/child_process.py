"""A child process that can always be killed, and takes everything that it started with it."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

STDERR_TAIL = 1500
_CHUNK = 1 << 16


class ChildDiedError(Exception):
    """The child ended without an answer; the message says how, with the end of what it printed."""


class ChildTimeoutError(Exception):
    """The child did not answer in time; it still runs."""


class Child:
    """A process in a process group of its own that answers JSON lines on its standard output.

    It is started by `Popen`, never by fork, so it inherits no CUDA context and runs none of the user's script. Kernel
    compilers that it starts are in its group and die with it. Start it from a thread that lives as long as it should,
    since Linux ties a parent-death signal to the thread.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the child
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environment),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Writes one message.

        Raises:
            ChildDiedError: the child has ended.
        """
        try:
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._obituary() from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            ChildDiedError: the child ended instead.
            ChildTimeoutError: nothing came for `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ChildTimeoutError(f"no answer within {timeout_s:.0f} s")
            data = os.read(self._output.fileno(), _CHUNK)
            if not data:
                raise self._obituary()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the child alone, not to what it started; harmless after its end. May be called while
        another thread waits in `receive`."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the child and its whole group, waits for it and frees its pipes; harmless when repeated."""
        if self._process.poll() is None:
            self._kill_group()
        self._process.wait()
        self._selector.close()
        for stream in (self._output, self._stderr):
            stream.close()
        with contextlib.suppress(BrokenPipeError):  # an unsent command; nobody is left to read it
            self._input.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _obituary(self) -> ChildDiedError:
        self._kill_group()  # what it started may outlive it
        code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return ChildDiedError(f"the worker process ended: {how}. {self._last_words()}".strip())

    def _last_words(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_TAIL))
        return self._stderr.read().decode(errors="replace").strip()
