"""Misses of the dispatcher: calls of shapes that have no measurement of their own on this device.

`watch` is all that the dispatcher calls, once for a new plan; a plan counts its own calls. A thread of its own writes
the counts to the file of `miss_file.py` now and then, so that no call waits for a disk, and the end of
the process writes what is left. `tune run --from-misses` makes work of them.
"""

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import kernels_for
from blocktune.kernels.values.errors import UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.explanation import Explanation
from blocktune.runtime.selection.fallback import ConfigTable
from blocktune.runtime.selection.miss_file import Miss, append_misses, miss_path
from blocktune.runtime.store_reader.provenance import Reuse
from blocktune.runtime.store_reader.sources import ConfigSource, LayeredConfigs

logger = logging.getLogger("blocktune")

MAX_WATCHED = 1024
"""Plans whose calls are counted at once. Beyond them the oldest is let go, with what it had counted."""

FIRST_SECONDS, MAX_SECONDS, LAST_SECONDS = 2.0, 900.0, 1.0
"""How soon after its first miss a process writes, how rarely a long-lived one does in the end, and how long it waits
at its end for a disk that does not answer."""


class Watched(Protocol):
    """A plan: why it was made, and how often it has run."""

    explanation: Explanation
    calls: int


class MissLog:
    """Counts the calls of watched plans and writes them to a file, or nowhere when there is no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        """Start empty, as a forked child must: it has no thread, and its parent writes the parent's counts."""
        self._lock = threading.Lock()  # held for moments: never while a file is written
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._plans: dict[int, tuple[Watched, int]] = {}  # with the calls that were counted already; oldest first
        self._counts: Counter[Miss] = Counter()

    def watch(self, plan: Watched) -> None:
        """Count the calls of this plan from now on."""
        if self._path is None:
            return
        with self._lock:
            self._plans[id(plan)] = plan, 0
            if len(self._plans) > MAX_WATCHED:
                self._count(self._plans.pop(next(iter(self._plans))))
            if self._thread is None and not self._closing.is_set():
                self._thread = self._start_writer()

    def write(self) -> None:
        """Add what was counted since the last time to the file. A place that cannot be written ends the counting."""
        counts = self._take_counts()
        if self._path is None or not counts:
            return
        try:
            append_misses(self._path, counts)
        except BlockingIOError:
            with self._lock:  # another process writes; next time
                self._counts.update(counts)
        except OSError as error:
            logger.warning("Misses are not counted any more: %s cannot be written (%s).", self._path, error.strerror)
            self._path = None

    def close(self) -> None:
        """Write for the last time."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)  # it may be writing
        self.write()

    def _start_writer(self) -> threading.Thread | None:
        """Return the thread that writes; None if the process may not start one: then all is written at its end."""
        thread = threading.Thread(target=self._write_now_and_then, name="blocktune-misses", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.info("Misses are written at the end of the process: %s.", error)
            return None
        return thread

    def _write_now_and_then(self) -> None:
        closing, seconds = self._closing, FIRST_SECONDS
        while not closing.wait(seconds) and self._path is not None:
            self.write()
            seconds = min(2 * seconds, MAX_SECONDS)

    def _take_counts(self) -> Counter[Miss]:
        with self._lock:
            for name, entry in self._plans.items():
                self._plans[name] = self._count(entry)
            taken, self._counts = self._counts, Counter()
        return taken

    def _count(self, entry: tuple[Watched, int]) -> tuple[Watched, int]:
        plan, before = entry
        calls, miss = plan.calls, miss_of(plan.explanation)
        if calls > before and miss is not None:
            self._counts[miss] += calls - before
        return plan, calls


def miss_of(explanation: Explanation) -> Miss | None:
    """Return the device and shape missed; None if the config was measured for them or no device was looked up."""
    if explanation.device is None or explanation.shape is None or explanation.is_measured_here:
        return None
    return explanation.device, explanation.shape


@cache
def _log() -> MissLog:
    """Return the log of the process, which begins with its first miss."""
    log = _new_log()
    atexit.register(log.close)
    os.register_at_fork(after_in_child=log._forget)
    return log


def _new_log() -> MissLog:
    """Return a log that writes to the user's file, or counts nothing where that cannot be named."""
    try:
        return MissLog(miss_path())
    except UsageError as error:
        logger.warning("Misses are not counted: %s", error)
        return MissLog(None)


def watch(plan: Watched) -> None:
    """Count the calls of a plan in this process's log, if they miss. Takes a moment, and waits for nothing."""
    if miss_of(plan.explanation) is not None:
        _log().watch(plan)


def work_of(device: DeviceSpec, source: ConfigSource, misses: Mapping[Miss, int]) -> list[AttentionShape]:
    """Return the shapes that were missed on this device and can be tuned, most frequent first.

    Left out is what the source has a measurement of by now (with another driver it counts, with another Triton it does
    not), and what no kernel computes.
    """
    table = ConfigTable(LayeredConfigs((source,)).configs(device))
    here = Counter({shape: calls for (key, shape), calls in misses.items() if key == device.key})
    wanted = (shape for shape, _ in here.most_common() if not _is_measured(table, shape))
    return [shape for shape in wanted if kernels_for(shape, device.limits)]


def _is_measured(table: ConfigTable, shape: AttentionShape) -> bool:
    return any(table.of_shape(reuse, shape) is not None for reuse in (Reuse.EXACT, Reuse.OTHER_DRIVER))
