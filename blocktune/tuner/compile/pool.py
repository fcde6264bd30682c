"""Worker processes that compile, each in a process that a compile may abort, hang or exhaust.

Worker processes are started as `python -m` with pipes: never by fork, which copies the state of threads and CUDA, and
never by multiprocessing's spawn, which runs the caller's main module again.
"""

import contextlib
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from blocktune.tuner.compile.answers import Answer
from blocktune.tuner.compile.child_process import ChildDiedError, ChildLostError
from blocktune.tuner.compile.compile_process import CompileProcess

Result = TypeVar("Result")


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
        self._busy: dict[Future[Any], CompileProcess | None] = {}  # None: its process is being started
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
                raise RuntimeError("The farm is closed and compiles nothing. Submit inside its `with` block.")
            self._jobs.put(job)
            self._add_worker(eager=False)
        return job.future

    def start(self) -> None:
        """Start a worker unless there are enough, so that the next job need not wait for it."""
        with self._lock:
            if not self._closed:
                self._add_worker(eager=True)

    def abort(self, future: "Future[Any]") -> None:
        """End a job that has begun: its result is that of a lost one. Harmless when it is done."""
        with self._lock:
            process = self._busy.pop(future, None)
            if process is not None:
                process.kill()

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

    def _add_worker(self, *, eager: bool) -> None:
        """Start one more thread unless there are enough; the caller holds the lock. eager: its process, too."""
        if len(self._threads) < self._workers:
            thread = threading.Thread(target=self._work, args=(eager,), name="blocktune-compile", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, eager: bool) -> None:
        process: CompileProcess | None = None
        if eager:
            with contextlib.suppress(RuntimeError):  # the first job tries again, and its caller gets the reason
                process = self._start()
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.future.cancel()
            with self._lock:  # who sees it running can abort it
                begins = job.future.set_running_or_notify_cancel()
                if begins:
                    self._busy[job.future] = process
            if not begins:
                continue
            try:
                process = process or self._start()
                job.future.set_result(job.answered(self._ask(process, job)))
            except Exception as error:
                self._stop(process)
                process = None
                self._finish_without(job, error)
        self._stop(process)

    def _ask(self, process: CompileProcess, job: _Job[Any]) -> Answer:
        """Return the worker's answer to a job.

        Raises:
            ChildLostError: there is none, or `abort` ended the job.
        """
        with self._lock:
            aborted = job.future not in self._busy
            if not aborted:
                self._busy[job.future] = process
        answer = {} if aborted else process.ask(job.message, self._timeout_s)
        with self._lock:
            aborted = self._busy.pop(job.future, None) is None
        if aborted:
            raise ChildDiedError("the worker was killed", signum=signal.SIGKILL)
        return answer

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
        with self._lock:
            self._busy.pop(job.future, None)
        if self._closed:
            job.future.set_exception(CancelledError())
        elif isinstance(error, ChildLostError):
            job.future.set_result(job.lost(error))
        else:
            job.future.set_exception(error)
