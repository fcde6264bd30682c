"""Warp partitions of a program as threads, and the named barriers at which they meet."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.gluon import barriers

NAMED_BARRIERS = 16
"""Of a multiprocessor."""
WARPS = 4
"""Of the first partition, as the kernels are launched."""


class Meeting:
    """A named barrier: so many threads arrive, some of which wait for the others."""

    def __init__(self) -> None:
        self.arrived = self.phase = 0
        self.changed = threading.Condition()

    def arrive(self, threads: int) -> int:
        """Return the phase in which the threads of this warp or warpgroup arrive."""
        with self.changed:
            phase = self.phase
            self.arrived += PARTITION.threads
            assert self.arrived <= threads, "more threads arrive than a barrier has"
            if self.arrived == threads:
                self.arrived, self.phase = 0, phase + 1
                self.changed.notify_all()
            return phase

    def sync(self, threads: int) -> None:
        with self.changed:
            phase = self.arrive(threads)
            if not self.changed.wait_for(lambda: self.phase > phase, barriers.PATIENCE):
                raise TimeoutError("a named barrier was never full: the kernel would hang")


class Partition(threading.local):
    """A thread's matrix products and copies in flight, each as the function that ends it."""

    def __init__(self) -> None:
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.threads = 0


PARTITION = Partition()
GRID = threading.local()


def warp_specialize(partitions: Sequence[tuple[Any, Any]], warps: Any, registers: Any) -> None:
    assert len(partitions) == len(warps) + 1 == len(registers) + 1
    place, failures, meetings = (GRID.program, GRID.programs), [], [Meeting() for _ in range(NAMED_BARRIERS)]

    def run(own_warps: int, function: Any, arguments: Any) -> None:
        GRID.program, GRID.programs = place
        GRID.meetings, PARTITION.threads = meetings, 32 * own_warps
        try:
            function(*arguments)
            assert not PARTITION.products, "a product was never waited for"
            assert not PARTITION.stores, "a copy was never waited for"
        except BaseException as error:
            failures.append(error)

    sizes = (WARPS, *warps)
    threads = [
        threading.Thread(target=run, args=(own, *partition)) for own, partition in zip(sizes, partitions, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise min(failures, key=lambda error: isinstance(error, TimeoutError))  # the cause before its consequences
    assert not any(meeting.arrived for meeting in meetings), "a named barrier is left half full"
