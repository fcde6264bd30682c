"""All configs of a call compiled at once, before the first one is launched.

Another process imports the kernel's library and forks workers that compile, which leave the code in Triton's disk
cache, where the launch finds it. What it cannot import (kernels of a script or notebook, constants that do not travel)
is compiled by threads of this process, which share its interpreter but not the work of the compiler.
"""

import atexit
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.runtime.autotuned.config import LAUNCH_OPTIONS, LaunchConfig, Plain
from blocktune.tuner.compile.answers import Answer, Compiled
from blocktune.tuner.compile.compiler import compile_here, has_code
from blocktune.tuner.compile_server.client import ServerClient
from blocktune.tuner.compile_server.farm import default_workers
from blocktune.tuner.offline.specialization import Specialization

logger = logging.getLogger("blocktune")

TIMEOUT_SECONDS = 300.0
"""A compile that takes longer hangs. Large kernels of libraries take minutes on a busy machine."""

IDLE_SECONDS = 60.0
"""How long workers are kept that have no work: the next kernel of a first training step comes within that."""


class CompileAhead:
    """Compiles configs at once; one serves all kernels of a process, so that a library is imported once.

    Args:
        workers: how many compile at once; None is `default_workers()`.
        timeout_s: seconds of one compile.
        found: a GPU that libraries find in place of those that are here.
    """

    def __init__(
        self, workers: int | None = None, timeout_s: float = TIMEOUT_SECONDS, found: DeviceSpec | None = None
    ) -> None:
        self._wanted_workers, self._timeout_s, self._found = workers, timeout_s, found
        self._server: ServerClient | None = None
        self._closing: threading.Timer | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def workers(self) -> int:
        """How many compile at once."""
        return self._wanted_workers or default_workers()

    def start(self, kernel: str) -> None:
        """Let the library of a kernel that another process can import be imported there, before there is work."""
        with self._lock:
            self._prepare_server(kernel)
            self._close_later()

    def compile(
        self,
        kernel: str,
        specializations: Iterable[Specialization],
        cc: tuple[int, int],
        max_spill_bytes: float = math.inf,
    ) -> dict[LaunchConfig, Compiled]:
        """Return how the compiles of a kernel ended, by config.

        One that still runs is given up when a config with less to a thread is found to spill more than this: it takes
        the longest of all, and would be dropped.
        """
        with self._lock, ThreadPoolExecutor(self.workers, "blocktune-compile") as threads:
            waiting: dict[Future[Any], Specialization] = {}
            for each in sorted(specializations, key=_work_of_a_thread, reverse=True):
                future = self._submit(kernel, each, cc) or threads.submit(compile_here, each.spec, cc)
                waiting[future] = each
            ended: dict[LaunchConfig, Compiled] = {}
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    each = waiting.pop(future)
                    ended[each.config] = _result(future) or compile_here(each.spec, cc)
                ended |= self._give_up(waiting, ended, max_spill_bytes)
            self._close_later()
            return ended

    def begin(self, kernel: str, each: Specialization, cc: tuple[int, int]) -> Callable[[], Compiled]:
        """Begin a compile, in the other process where that can do it, and return what waits for its end."""
        with self._lock:
            future = self._submit(kernel, each, cc)
            self._close_later()
        return lambda: (future and _result(future)) or compile_here(each.spec, cc)

    def _submit(self, kernel: str, each: Specialization, cc: tuple[int, int]) -> "Future[Compiled | None] | None":
        """Return a compile by the other process; None where this one has to compile, or to read what is compiled."""
        if each.document is None or has_code(each.spec, each.key):
            return None
        job = {"kernel": kernel, "spec": each.document, "key": each.key, "cc": list(cc)}
        return self._prepare_server(kernel).submit(
            job, _read_answer, lambda lost: Compiled.from_lost_worker(lost, self._timeout_s)
        )

    def _give_up(
        self, waiting: dict[Future[Any], Specialization], ended: Mapping[LaunchConfig, Compiled], bound: float
    ) -> dict[LaunchConfig, Compiled]:
        """Take from what waits those that are sure to spill more than a bound, and return how they end."""
        spilling = {
            config: _spill_bytes(compiled) for config, compiled in ended.items() if _spill_bytes(compiled) > bound
        }
        given_up = {}
        for future, each in list(waiting.items()):
            lighter = next((config for config in spilling if _has_more_to_a_thread(each.config, config)), None)
            if lighter is None:
                continue
            if not future.cancel() and self._server is not None:
                self._server.abort(future)
            del waiting[future]
            error = f"{lighter.label} has less to a thread, which spills {spilling[lighter]} bytes of {bound} allowed"
            given_up[each.config] = Compiled(outcome=Outcome.INFEASIBLE, error=f"{error} (max_spill_bytes)")
        return given_up

    def close(self) -> None:
        """End the process that compiles; later compiles start another."""
        with self._lock:
            if self._closing is not None:
                self._closing.cancel()
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _prepare_server(self, kernel: str) -> ServerClient:
        """Return a process that has the kernel's library, or is about to import it."""
        if self._server is None or self._server.is_lost:
            self._server = ServerClient(self.workers, self._timeout_s)
        self._server.prepare(kernel.partition(":")[0], self._found)
        return self._server

    def _close_later(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._closing = threading.Timer(IDLE_SECONDS, self._close_idle)
        self._closing.daemon = True
        self._closing.start()

    def _close_idle(self) -> None:
        """End the process unless it has work: a compile may take longer than it waits for the next one."""
        with self._lock:
            if self._server is not None and self._server.is_busy:
                self._close_later()
                return
        self.close()


def _work_of_a_thread(specialization: Specialization) -> float:
    """Return how many elements a thread has, by the sizes of a config: where that is the most, the compile takes the
    longest, and all wait for it if it begins last."""
    parameters = specialization.config.parameters
    sizes = [value for name, value in parameters.items() if type(value) is int and name not in LAUNCH_OPTIONS]
    return math.prod(max(1, size) for size in sizes) / int(parameters.get("num_warps") or 4)


def _has_more_to_a_thread(config: LaunchConfig, other: LaunchConfig) -> bool:
    """Return whether a config is another one with larger sizes, fewer warps, or both."""
    ours, theirs = config.parameters, other.parameters
    if ours == theirs or ours.keys() != theirs.keys():
        return False
    return all(_is_as_heavy(name, value, theirs[name]) for name, value in ours.items())


def _is_as_heavy(name: str, value: Plain, than: Plain) -> bool:
    if type(value) is not int or type(than) is not int or (name in LAUNCH_OPTIONS and name != "num_warps"):
        return value == than
    return value <= than if name == "num_warps" else value >= than


def _spill_bytes(compiled: Compiled) -> int:
    return 0 if compiled.resources is None else compiled.resources.spill_bytes


def _result(future: "Future[Compiled | None]") -> Compiled | None:
    """Return the end of a compile; None where this process has to compile itself: there is no other, with a warning, or
    it has another source."""
    try:
        return future.result()
    except RuntimeError as error:
        logger.warning("Configs are compiled one after another: %s", error)
        return None


def _read_answer(answer: Answer) -> Compiled | None:
    """Return the end of a compile; None if the worker had another source under the kernel's name."""
    found = Compiled.of_answer(answer)
    return None if found.outcome is Outcome.OK and found.resources is None else found


compile_ahead: Any = CompileAhead()
"""That of this process."""
