"""The process that compiles autotuned kernels, seen from the one that launches them."""

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from blocktune.tuner.compile.answers import Answer
from blocktune.tuner.compile.child_process import ChildDiedError, ChildLostError, ChildTimeoutError
from blocktune.tuner.compile.compile_process import CompileProcess

WORKER = "blocktune.tuner.jitted.compile_server"

GRACE_SECONDS = 30.0
"""A process that says nothing for this much longer than a job may take is lost."""

_END_SECONDS = 1.0


class ServerClient:
    """Hands jobs to a process that forks a worker for each. Threads may share it.

    One thread starts the process and listens to it until it ends: Linux ties the end of a child to the thread that has
    started it.

    Args:
        timeout_s: seconds of one job.
        environment: of the process.
    """

    def __init__(self, timeout_s: float, environment: Mapping[str, str]) -> None:
        self._timeout_s, self._environment = timeout_s, environment
        self._process: Future[CompileProcess] = Future()
        self._pending: dict[int, Future[Answer]] = {}
        self._jobs = 0
        self._lost: RuntimeError | None = None
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="blocktune-compile", daemon=True)
        self._listener.start()

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended."""
        return self._lost is not None

    @property
    def is_busy(self) -> bool:
        """Whether a job has no answer yet."""
        return bool(self._pending)

    def prepare(self, module: str, path: list[str], environment: Mapping[str, str]) -> None:
        """Let what is submitted next be compiled with a module imported, by these paths and this environment.

        Raises:
            RuntimeError: the process has ended, or cannot be started.
        """
        self._send({"prepare": module, "path": path, "environment": dict(environment)})

    def submit(self, job: Mapping[str, Any], workers: int) -> "Future[Answer]":
        """Hand over a job, of which up to `workers` run at a time; its result is the answer of its worker.

        Where the worker dies or takes too long `result()` raises ChildLostError, where the whole process is lost
        RuntimeError.
        """
        future: Future[Answer] = Future()
        with self._lock:
            if self._lost is not None:
                future.set_exception(self._lost)
                return future
            self._jobs += 1
            number = self._jobs
            self._pending[number] = future
        try:
            self._send({**job, "id": number, "timeout_s": self._timeout_s, "workers": workers})
        except RuntimeError as error:
            self._lose(error)
        return future

    def abandon(self, future: "Future[Answer]") -> bool:
        """End a job whose answer is not wanted; return whether it was one of these jobs."""
        with self._lock:
            number = next((number for number, each in self._pending.items() if each is future), None)
            if number is None:
                return False
            del self._pending[number]
        with contextlib.suppress(RuntimeError):  # the process has ended, and the job with it
            self._send({"abandon": number})
        return True

    def close(self) -> None:
        """End the process with all that it compiles."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._send({"end": True})
            self._listener.join(_END_SECONDS)
            self._process.result().kill()
        self._listener.join()

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            RuntimeError: the process has ended, or cannot be started.
        """
        try:
            process = self._process.result()
            with self._lock:  # the listener closes the process's pipes after it has said that it is lost
                if self._lost is not None:
                    raise self._lost
                process.send(message)
        except (OSError, ChildLostError) as error:
            raise RuntimeError(f"The process that compiles must take jobs, but {error}.") from error

    def _listen(self) -> None:
        try:
            process = CompileProcess("any", worker=WORKER, environment=self._environment)
        except OSError as error:
            self._process.set_exception(error)
            return
        self._process.set_result(process)
        try:
            process.wait_until_ready()
            while True:
                self._answered(process)
        except (ChildLostError, RuntimeError) as error:
            self._lose(RuntimeError(str(error)))
        finally:
            process.end()

    def _answered(self, process: CompileProcess) -> None:
        """Take the next answer.

        Raises:
            ChildLostError: none comes, and none will.
        """
        try:
            answer = process.receive(self._timeout_s + GRACE_SECONDS)
        except ChildTimeoutError:
            if self._pending:
                raise
            return
        with self._lock:
            future = self._pending.pop(answer.pop("id"), None)
        if future is None:
            return
        lost = answer.get("lost")
        if lost is None:
            future.set_result(answer)
        elif lost == "timeout":
            future.set_exception(ChildTimeoutError("no answer in time", answer["last_words"]))
        else:
            future.set_exception(ChildDiedError("the worker died", answer["last_words"], answer["signum"]))

    def _lose(self, error: RuntimeError) -> None:
        """Answer everything that waits with an error."""
        with self._lock:
            self._lost = error
            waiting, self._pending = list(self._pending.values()), {}
        for future in waiting:
            future.set_exception(error)
