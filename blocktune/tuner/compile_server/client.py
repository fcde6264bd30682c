"""The process that compiles, seen from the one that launches."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from blocktune.kernels.files.variables import AUTOTUNE
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.tuner.compile.answers import Answer
from blocktune.tuner.compile.child_process import Child, ChildDiedError, ChildLostError, ChildTimeoutError

SERVER = "blocktune.tuner.compile_server.server"

START_SECONDS = 120.0
"""The process imports PyTorch and Triton before its first job; on a cold network disk that takes long."""

GRACE_SECONDS = 30.0
"""A process that says nothing for this much longer than a job may take is lost."""

_END_SECONDS = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Job(Generic[Result]):
    """A job without an answer: its future, and what makes a result of an answer or of a lost worker."""

    future: "Future[Result]"
    answered: Callable[[Answer], Result]
    lost: Callable[[ChildLostError], Result]

    def finish(self, answer: Answer) -> None:
        """Give the future its result, by what the process says of the worker."""
        try:
            self.future.set_result(self._result(answer))
        except InvalidStateError:  # it was cancelled meanwhile
            return
        except Exception as error:  # whatever `answered` and `lost` raise belongs to who waits
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Give the future an error, unless it was cancelled."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)

    def drop(self) -> None:
        """Cancel the future, or give one that has begun the same error."""
        if self.future.cancel():
            self.future.set_running_or_notify_cancel()  # which is what wakes those who wait
        else:
            self.fail(CancelledError())

    def _result(self, answer: Answer) -> Result:
        how = answer.get("lost")
        if how is None:
            return self.answered(answer)
        if how == "timeout":
            return self.lost(ChildTimeoutError("no answer in time", answer["last_words"]))
        return self.lost(ChildDiedError("the worker died", answer["last_words"], answer["signum"]))


class ServerClient:
    """Hands jobs to a process that forks workers for them. Threads may share it.

    A job that exceeds its time is killed with its ptxas, one that kills its process costs that process; no other job
    notices. One thread starts the server and listens to it until it ends: Linux ties the end of a child to the thread
    that has started it.

    Args:
        workers: how many jobs run at a time.
        timeout_s: seconds of one job.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        self._workers, self._timeout_s = workers, timeout_s
        self._process: Future[_ServerProcess] = Future()
        self._pending: dict[int, _Job[Any]] = {}
        self._jobs = 0
        self._prepared: dict[str, Any] = {}
        self._lost: RuntimeError | None = None
        self._lock, self._sending = threading.Lock(), threading.Lock()
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

    def prepare(self, module: str, found: DeviceSpec | None = None) -> None:
        """Let what is submitted next be compiled with a module imported, by the paths and the environment of this
        process; one that has ended says so to the first job.

        Args:
            module: what is imported.
            found: a GPU that the module finds in place of those that are here.
        """
        environment = worker_environment()
        path = environment["PYTHONPATH"].split(os.pathsep)
        message: dict[str, Any] = {"prepare": module, "path": path, "environment": environment}
        if found is not None:
            message["found"] = found.to_json()
        if message != self._prepared:
            self._prepared = message
            with contextlib.suppress(RuntimeError):
                self._send(message)

    def submit(
        self, job: Mapping[str, Any], answered: Callable[[Answer], Result], lost: Callable[[ChildLostError], Result]
    ) -> "Future[Result]":
        """Hand over a job. The future's `cancel` drops one that has not begun; where the whole process is lost,
        `result()` raises RuntimeError.

        Args:
            job: what the process is sent.
            answered: makes the result of an answer.
            lost: makes the result where the worker dies or takes too long.
        """
        made = _Job(Future[Result](), answered, lost)
        with self._lock:
            if self._lost is not None:
                made.fail(self._lost)
                return made.future
            self._jobs += 1
            number = self._jobs
            self._pending[number] = made
        made.future.add_done_callback(partial(self._drop_cancelled, number))
        try:
            self._send({**job, "id": number, "timeout_s": self._timeout_s, "workers": self._workers})
        except RuntimeError as error:
            self._lose(error)
        return made.future

    def abort(self, future: "Future[Any]") -> None:
        """Drop a job that has not begun, and end one that has: its result is that of a lost one. Harmless when it is
        done, or none of this process."""
        if future.cancel():
            return
        with self._lock:
            number = next((number for number, job in self._pending.items() if job.future is future), 0)
            job = self._pending.pop(number, None)
        if job is not None:
            self._abandon(number)
            job.finish({"lost": "died", "signum": signal.SIGKILL, "last_words": ""})

    def close(self) -> None:
        """Drop what has not begun, and end the process with all that it compiles."""
        for job in self._take_pending():
            job.drop()
        with contextlib.suppress(RuntimeError):  # it has ended
            self._send({"end": True})
            self._listener.join(_END_SECONDS)
            self._process.result().kill()
        self._listener.join()

    def _take_pending(self) -> list[_Job[Any]]:
        """Return all jobs without an answer, which are forgotten."""
        with self._lock:
            waiting, self._pending = list(self._pending.values()), {}
        return waiting

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            RuntimeError: the process has ended, or cannot be started.
        """
        try:
            process = self._process.result()
            with self._sending:  # the listener closes the process's pipes after it has said that it is lost
                if self._lost is not None:
                    raise self._lost
                process.send(message)
        except (OSError, ChildLostError) as error:
            raise RuntimeError(f"The process that compiles must take jobs, but {error}.") from error

    def _abandon(self, number: int) -> None:
        """Let the process forget a job, and end the worker that does it."""
        with contextlib.suppress(RuntimeError):  # the process has ended, and the job with it
            self._send({"abandon": number})

    def _drop_cancelled(self, number: int, future: "Future[Any]") -> None:
        with self._lock:
            job = self._pending.pop(number, None) if future.cancelled() else None
        if job is not None:
            future.set_running_or_notify_cancel()
            self._abandon(number)

    def _listen(self) -> None:
        try:
            process = _ServerProcess()
        except OSError as error:
            self._process.set_exception(error)
            return
        self._process.set_result(process)
        try:
            process.wait_until_ready()
            while True:
                self._take(process)
        except (ChildLostError, RuntimeError) as error:
            process.kill()  # who sends to one that hangs would wait for ever
            self._lose(RuntimeError(str(error)))
        finally:
            process.end()

    def _take(self, process: "_ServerProcess") -> None:
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
        number = answer.pop("id")
        if "begun" in answer:
            self._begin(number)
            return
        with self._lock:
            job = self._pending.pop(number, None)
        if job is not None:
            job.finish(answer)

    def _begin(self, number: int) -> None:
        """Note that a worker does a job; one that was cancelled meanwhile is abandoned."""
        with self._lock:
            job = self._pending.get(number)
            if job is None or job.future.set_running_or_notify_cancel():
                return
            del self._pending[number]
        self._abandon(number)

    def _lose(self, error: RuntimeError) -> None:
        """Answer everything that waits with an error."""
        with self._sending:
            self._lost = error
        for job in self._take_pending():
            job.fail(error)


class _ServerProcess(Child):
    """The process, which takes the paths of this one with the first job."""

    def __init__(self) -> None:
        # -P: a folder that happens to be called `triton` where the user stands is not imported
        super().__init__([sys.executable, "-P", "-m", SERVER, str(os.getpid())], worker_environment())

    def wait_until_ready(self) -> None:
        """Wait until it takes jobs.

        Raises:
            RuntimeError: it does not come up; the message has what it said.
        """
        try:
            self.receive(START_SECONDS)
        except ChildLostError as lost:
            said = lost.last_words or "it said nothing"
            raise RuntimeError(
                f"The process that compiles did not start within {START_SECONDS:.0f} s: {said}. Try `python -P -c "
                f"'import {SERVER}'`."
            ) from None


def worker_environment() -> dict[str, str]:
    """Return the environment of a process that imports what this one has imported, and tunes nothing itself."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, AUTOTUNE.name: "0"}
