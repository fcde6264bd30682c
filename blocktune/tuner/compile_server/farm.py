"""Compiles many configs at once, each in a process that it may abort, hang or exhaust.

with CompileFarm() as farm:
    futures = [farm.submit(config.kernel, config, shape, (9, 0)) for config in configs]
    for future in concurrent.futures.as_completed(futures):
        print(future.result())
"""

import math
import os
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from blocktune.kernels.files.reading import SYSTEM_BYTES, read_text
from blocktune.kernels.files.variables import PROCESSORS
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.shape import AttentionShape
from blocktune.tuner.compile.answers import Answer, is_crash
from blocktune.tuner.compile.cache import ResourceCache
from blocktune.tuner.compile.child_process import ChildLostError
from blocktune.tuner.compile.compiler import CompileResult, compile_key, has_code, hash_triton
from blocktune.tuner.compile_server.client import ServerClient
from blocktune.tuner.compile_server.jobs import attention_job, find_kernels
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses

COMPILE_TIMEOUT_S = 60.0

MAX_WORKERS = 32
"""A worker takes up to 1 GiB; a large machine is not filled by default."""


class CompileFarm:
    """Worker processes that compile; a context manager.

    A compile that exceeds its time ends as `COMPILE_TIMEOUT`, one that kills its process as `COMPILE_ERROR` with the
    signal's name.

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
        self._workers, self._timeout_s = workers or default_workers(), timeout_s
        self._cache = cache or ResourceCache()
        self._need_code = need_code
        self._kernels, self._get_kernel = kernels, find_kernels(kernels)
        self._server: ServerClient | None = None
        self._closed = False
        self._ahead: dict[str, Future[CompileResult]] = {}
        self._hashing: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[CompileResult]":
        """Compile a config, or look it up, which completes the future at once.

        The future has a result however the compile ends. Its `cancel` drops a compile that has not begun.

        Raises:
            RuntimeError: the farm is closed.
        """
        spec = self._get_kernel(kernel).compile_spec(config, shape)
        if self._hashing is not None:
            self._hashing.join()
        key = compile_key(spec, cc)
        known = self._cache.get(key)
        if known is not None and (known.resources is None or not self._need_code or has_code(spec, key)):
            future: Future[CompileResult] = Future()
            future.set_result(known)
            return future
        if (begun := self._ahead.pop(key, None)) is not None:
            return begun
        job = attention_job(self._kernels, kernel, config, shape, cc, with_lse=False)
        return self._start_server().submit(
            job, partial(self._remember, key, config), partial(self._lost_result, key, config)
        )

    def submit_ahead(self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]) -> None:
        """Compile a config that will be submitted later. `submit` then takes the compile over, however far it is; a
        second one would wait for all that was submitted meanwhile.

        Raises:
            RuntimeError: the farm is closed.
        """
        key = compile_key(self._get_kernel(kernel).compile_spec(config, shape), cc)
        self._ahead[key] = self.submit(kernel, config, shape, cc)

    def submit_with_lse(
        self, kernel: str, config: KernelConfig, shape: AttentionShape, cc: tuple[int, int]
    ) -> "Future[bool]":
        """Have Triton's cache hold the code of launches that also write the log-sum-exp. The future says whether a
        worker compiled it without an error; where not, the launch says what is wrong.

        Raises:
            RuntimeError: the farm is closed.
        """
        job = attention_job(self._kernels, kernel, config, shape, cc, with_lse=True)
        return self._start_server().submit(job, lambda answer: not answer["error"], lambda lost: False)

    def start(self) -> None:
        """Start the process that compiles, so that the next compile need not wait for its imports. A thread hashes
        Triton meanwhile, which the first key needs."""
        if self._hashing is None:
            self._hashing = threading.Thread(target=hash_triton, name="blocktune-hash", daemon=True)
            self._hashing.start()
        self._start_server()

    def abort(self, future: "Future[CompileResult]") -> None:
        """Drop a compile that has not begun, and end one that has: its result is a `COMPILE_ERROR` that is not
        remembered. One that is done stays as it is."""
        if self._server is not None:
            self._server.abort(future)

    def close(self) -> None:
        """Drop what has not begun, kill what is compiling and wait until every process is gone."""
        self._closed = True
        if self._server is not None:
            self._server.close()

    def _start_server(self) -> ServerClient:
        """Return the process that compiles; one that is lost is replaced.

        Raises:
            RuntimeError: the farm is closed.
        """
        if self._closed:
            raise RuntimeError("The farm is closed and compiles nothing. Submit inside its `with` block.")
        if self._server is None or self._server.is_lost:
            self._server = ServerClient(self._workers, self._timeout_s)
            self._server.prepare(self._kernels.partition(":")[0])
        return self._server

    def _remember(self, key: str, config: KernelConfig, answer: Answer) -> CompileResult:
        shared = answer["shared"]
        accesses = None if shared is None else SharedAccesses(**shared)
        result = CompileResult.of_answer(answer, config=config, shared=accesses)
        if not result.transient:
            self._cache.put(key, result)
        return result

    def _lost_result(self, key: str, config: KernelConfig, lost: ChildLostError) -> CompileResult:
        result = CompileResult.from_lost_worker(lost, self._timeout_s, config=config)
        if is_crash(lost):
            self._cache.put(key, result)
        return result


def default_workers() -> int:
    """Return one for each of `processors()`, up to `MAX_WORKERS`."""
    return max(1, min(int(processors()), MAX_WORKERS))


def processors() -> float:
    """Return the processors that this process may use: what it is bound to, what its container grants, and
    the variable `PROCESSORS`, whichever is least."""
    return min(len(os.sched_getaffinity(0)), _cpu_quota(), _granted_processors())


def _cpu_quota() -> float:
    """Return the processors that the control group of this container grants; infinite where it sets no limit."""
    try:
        quota, period = read_text(Path("/sys/fs/cgroup/cpu.max"), SYSTEM_BYTES).split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else int(quota) / int(period)


def _granted_processors() -> float:
    """Return the processors that the variable `PROCESSORS` grants; infinite where it is not set."""
    return PROCESSORS.number() or math.inf
