"""Compiles many configs at once, each in a process that it may abort, hang or exhaust.

    with CompileFarm() as farm:
        futures = [farm.submit(config.kernel, config, shape, (9, 0)) for config in configs]
        for future in concurrent.futures.as_completed(futures):
            print(future.result())

Worker processes are started as `python -m` with pipes: never by fork, which copies the state of threads and CUDA, and
never by multiprocessing's spawn, which runs the caller's main module again.
"""

import math
import os
import queue
import signal
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.child_process import ChildDiedError, ChildLostError
from blocktune.tuner.compile.compile_process import CompileProcess
from blocktune.tuner.compile.compiler import CompileResult, compile_key, has_code
from blocktune.tuner.compile.worker import find_kernels
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

COMPILE_TIMEOUT_S = 60.0

MAX_WORKERS = 32
"""A worker takes up to 1 GiB; a large machine is not filled by default."""

PROCESSORS_VARIABLE = "BLOCKTUNE_PROCESSORS"
"""Environment variable with the number of processors to use, for searches that share a machine."""

_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals by which a compiler dies of its input; others come from outside, and the same compile may succeed later."""


@dataclass(frozen=True, slots=True)
class _Job:
    key: str
    config: KernelConfig
    message: dict[str, Any]
    future: "Future[CompileResult]"


class CompileFarm:
    """Worker processes that compile; a context manager.

    A compile that exceeds its time is killed with its ptxas and ends as `COMPILE_TIMEOUT`, one that kills its process
    ends as `COMPILE_ERROR` with the signal's name; the worker is replaced and no other compile notices.

    Args:
        workers: number of processes; None is `default_workers()`.
        timeout_s: seconds of one compile.
        cache: where results are remembered; None is the user's cache.
        need_code: a remembered success counts only while Triton's disk cache holds its code. For a device that is
            present and will launch what was compiled.
        kernels: the function that finds a kernel by its name, as module:function; the workers import it.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        timeout_s: float = COMPILE_TIMEOUT_S,
        cache: ResourceCache | None = None,
        need_code: bool = False,
        kernels: str = "blocktune.kernels.registry:get_kernel",
    ) -> None:
        self._workers = workers or default_workers()
        self._timeout_s = timeout_s
        self._cache = cache or ResourceCache()
        self._need_code = need_code
        self._kernels = kernels
        self._get_kernel = find_kernels(kernels)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: set[CompileProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[CompileResult]":
        """Compiles a config, or looks it up, which completes the future at once.

        The future has a result however the compile ends. Its `cancel` drops a compile that has not begun.

        Raises:
            RuntimeError: the farm is closed.
        """
        spec = self._get_kernel(kernel).compile_spec(config, shape)
        key = compile_key(spec, cc)
        future: Future[CompileResult] = Future()
        known = self._cache.get(key)
        if known is not None and (known.resources is None or not self._need_code or has_code(spec, key)):
            future.set_result(known)
            return future
        message = {"kernel": kernel, "config": config.to_json(), "shape": shape.to_json(), "cc": cc}
        self._enqueue(_Job(key, config, message | {"timeout_s": self._timeout_s}, future))
        return future

    def close(self) -> None:
        """Drops what has not begun, kills what is compiling and waits until every process is gone."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _enqueue(self, job: _Job) -> None:
        """Hands a job to the workers, one more unless there are enough; each has a thread that starts and asks it."""
        with self._lock:
            if self._closed:
                raise RuntimeError("A closed farm compiles nothing. Submit inside its `with` block.")
            self._jobs.put(job)
            if len(self._threads) < self._workers:
                thread = threading.Thread(target=self._work, name="blocktune-compile", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        process: CompileProcess | None = None
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.future.cancel()
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                process = process or self._start()
                job.future.set_result(self._remembered(job, process.ask(job.message, self._timeout_s)))
            except Exception as error:
                self._stop(process)
                process = None
                self._finish_without(job, error)
        self._stop(process)

    def _start(self) -> CompileProcess:
        process = CompileProcess(self._kernels)
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

    def _remembered(self, job: _Job, answer: dict[str, Any]) -> CompileResult:
        resources, shared = answer["resources"], answer["shared"]
        result = CompileResult(
            config=job.config,
            outcome=Outcome(answer["outcome"]),
            resources=None if resources is None else KernelResources(**resources),
            shared=None if shared is None else SharedAccesses(**shared),
            error=answer["error"],
            seconds=answer["seconds"],
        )
        if not answer["transient"]:
            self._cache.put(job.key, result)
        return result

    def _finish_without(self, job: _Job, error: Exception) -> None:
        """Ends a job that has no answer. Where no worker comes up at all, the caller's `result()` raises the error."""
        if self._closed:
            job.future.set_exception(CancelledError())
        elif not isinstance(error, ChildLostError):
            job.future.set_exception(error)
        else:
            result = self._lost(job.config, error)
            if isinstance(error, ChildDiedError) and error.signum in _CRASHES:
                self._cache.put(job.key, result)
            job.future.set_result(result)

    def _lost(self, config: KernelConfig, lost: ChildLostError) -> CompileResult:
        if isinstance(lost, ChildDiedError):
            outcome, reason = Outcome.COMPILE_ERROR, f"The compiler's process ended by {_ending(lost.signum)}."
        else:
            outcome, reason = Outcome.COMPILE_TIMEOUT, f"The compile took more than {self._timeout_s:g} s."
        return CompileResult(config=config, outcome=outcome, error=f"{reason} {lost.last_words}".strip())


def default_workers() -> int:
    """One for each of `processors()`, up to `MAX_WORKERS`."""
    return max(1, min(int(processors()), MAX_WORKERS))


def processors() -> float:
    """Processors that this process may use: what it is bound to, what its container grants, and `PROCESSORS_VARIABLE`,
    whichever is least."""
    return min(len(os.sched_getaffinity(0)), _cpu_quota(), _granted())


def _cpu_quota() -> float:
    """Processors that the control group of this container grants; infinite where it sets no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else int(quota) / int(period)


def _granted() -> float:
    """Processors that `PROCESSORS_VARIABLE` grants; infinite where it is not set.

    Raises:
        UsageError: it is no positive number.
    """
    text = os.environ.get(PROCESSORS_VARIABLE)
    if not text:
        return math.inf
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"`{PROCESSORS_VARIABLE} >= 1` must hold, but it is {text!r}. Set a number or nothing.")
    return int(text)


def _ending(signum: int) -> str:
    if not signum:
        return "itself"
    name = signal.Signals(signum).name
    return f"{name}, which may mean that memory ran out" if signum == signal.SIGKILL else name
