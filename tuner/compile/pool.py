"""Worker processes that compile, each in a process that a compile may abort, hang or exhaust.

Worker processes are started as `python -m` with pipes: never by fork, which copies the state of threads and CUDA, and
never by multiprocessing's spawn, which runs the caller's main module again.
"""

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from blocktune.tuner.compile.child_process import ChildDiedError, ChildLostError
from blocktune.tuner.compile.compile_process import CompileProcess

_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals by which a compiler dies of its input; others come from outside, and the same compile may succeed later."""

Result = TypeVar("Result")

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Job(Generic[Result]):
    message: dict[str, Any]
    answered: Callable[[Answer], Result]
    lost: Callable[[ChildLostError], Result]
    future: "Future[Result]"


class WorkerPool:
    """Processes that answer messages; each has a thread that starts and asks it.

    A job that exceeds its time is killed with its ptxas, one that kills its process costs that process; the worker is
    replaced and no other job notices.

    Args:
        workers: number of processes.
        timeout_s: seconds of one job.
        make_process: starts a worker.
    """

    def __init__(self, workers: int, timeout_s: float, make_process: Callable[[], CompileProcess]) -> None:
        self._workers, self._timeout_s, self._make_process = workers, timeout_s, make_process
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: set[CompileProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self,
        message: dict[str, Any],
        answered: Callable[[Answer], Result],
        lost: Callable[[ChildLostError], Result],
    ) -> "Future[Result]":
        """Hand a job to the workers, one more unless there are enough.

        Args:
            message: what the worker is sent, with `timeout_s` added.
            answered: makes the result of an answer.
            lost: makes the result where the worker gave none.

        Raises:
            RuntimeError: the pool is closed.
        """
        job = _Job(message | {"timeout_s": self._timeout_s}, answered, lost, Future[Result]())
        with self._lock:
            if self._closed:
                raise RuntimeError("A closed farm compiles nothing. Submit inside its `with` block.")
            self._jobs.put(job)
            if len(self._threads) < self._workers:
                thread = threading.Thread(target=self._work, name="blocktune-compile", daemon=True)
                self._threads.append(thread)
                thread.start()
        return job.future

    def close(self) -> None:
        """Drop what has not begun, kill what is compiling and wait until every process is gone."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        process: CompileProcess | None = None
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.future.cancel()
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                process = process or self._start()
                job.future.set_result(job.answered(process.ask(job.message, self._timeout_s)))
            except Exception as error:
                self._stop(process)
                process = None
                self._finish_without(job, error)
        self._stop(process)

    def _start(self) -> CompileProcess:
        process = self._make_process()
        with self._lock:
            self._processes.add(process)
            if self._closed:
                process.kill()
        try:
            process.wait_until_ready()
        except RuntimeError:
            self._stop(process)
            raise
        return process

    def _stop(self, process: CompileProcess | None) -> None:
        if process is not None:
            with self._lock:
                self._processes.discard(process)
            process.end()

    def _finish_without(self, job: _Job[Any], error: Exception) -> None:
        """End a job that has no answer. Where no worker comes up at all, the caller's `result()` raises the error."""
        if self._closed:
            job.future.set_exception(CancelledError())
        elif isinstance(error, ChildLostError):
            job.future.set_result(job.lost(error))
        else:
            job.future.set_exception(error)


def is_crash(lost: ChildLostError) -> bool:
    """Return whether the compiler died of its input."""
    return isinstance(lost, ChildDiedError) and lost.signum in _CRASHES


def reason_of(lost: ChildLostError, timeout_s: float) -> str:
    """Return why a worker gave no answer, for people."""
    if isinstance(lost, ChildDiedError):
        reason = f"The compiler's process ended by {_ending(lost.signum)}."
    else:
        reason = f"The compile took more than {timeout_s:g} s."
    return f"{reason} {lost.last_words}".strip()


def _ending(signum: int) -> str:
    if not signum:
        return "itself"
    name = signal.Signals(signum).name
    return f"{name}, which may mean that memory ran out" if signum == signal.SIGKILL else name
