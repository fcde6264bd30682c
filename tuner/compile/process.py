"""One worker process of a compile farm, seen from the parent."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

START_TIMEOUT_S = 120.0
"""A worker imports Triton before its first job; on a cold network disk that takes long."""

_LOG_TAIL = 1500


class WorkerLostError(Exception):
    """The worker has no answer: it took too long (`signum` is None) or ended, by this signal (0: by itself)."""

    def __init__(self, signum: int | None, log: str) -> None:
        super().__init__(log)
        self.signum = signum
        self.log = log


class WorkerProcess:
    """A worker in a process group of its own, so that its ptxas ends with it and Ctrl-C does not reach it.

    To be created and asked by one thread that outlives it: Linux ends the worker with the thread that started it. Any
    thread may `kill` it.
    """

    def __init__(self, kernels: str) -> None:
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115  (lives as long as the worker; `end` closes it)
        # -P: a folder that happens to be called `triton` where the user stands is not imported.
        command = [sys.executable, "-P", "-m", "blocktune.tuner.compile.worker", kernels, str(os.getpid())]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0, start_new_session=True
        )
        self._reaping = threading.Lock()
        self._unread = b""

    def wait_until_ready(self) -> None:
        """Waits until the worker takes jobs.

        Raises:
            RuntimeError: it does not come up; the message has what it said.
        """
        try:
            self._answer(START_TIMEOUT_S)
        except WorkerLostError as lost:
            said = lost.log or "it said nothing"
            raise RuntimeError(
                f"A compile worker must start within {START_TIMEOUT_S:.0f} s, but it did not: {said}. "
                "Try `python -P -c 'import blocktune.tuner.compile.worker'`."
            ) from None

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The worker's answer to a message.

        Raises:
            WorkerLostError: there is none; the worker is of no more use.
        """
        self._log.truncate(0)
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._lost() from None
        return self._answer(timeout_s)

    def kill(self) -> None:
        """Kills the worker and what it started."""
        with self._reaping:  # once it is reaped, its number may be another process's
            if self._popen.returncode is None:
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills the worker if need be, waits until it is gone and releases its pipes."""
        self.kill()
        with self._reaping:
            self._popen.wait()
        self._stdin.close()
        self._stdout.close()
        self._log.close()

    @property
    def _stdin(self) -> Any:
        return self._popen.stdin

    @property
    def _stdout(self) -> Any:
        return self._popen.stdout

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        ready = select.poll()
        ready.register(self._stdout, select.POLLIN)
        while b"\n" not in self._unread:
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise WorkerLostError(None, self._tail())
            received = os.read(self._stdout.fileno(), 1 << 16)
            if not received:
                raise self._lost()
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self) -> WorkerLostError:
        """Why the worker ended; what it started is killed before its group's number becomes free."""
        self.kill()
        with self._reaping:
            status = self._popen.wait()
        return WorkerLostError(max(0, -status), self._tail())

    def _tail(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL))
        return self._log.read().decode(errors="replace").strip()
