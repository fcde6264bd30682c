"""Stand-ins for mbarriers, which count arrivals and bytes and have phases."""

import threading

PATIENCE = 60.0
"""Seconds that a wait may take: everything here is over in a fraction of one, unless the machine is busy.

It is read at every wait: tests that wait in vain set it here.
"""


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def update(self, arrivals: int, expected: int) -> None:
        with self.changed:
            assert arrivals <= self.pending, "more arrivals than a phase has"
            self.pending -= arrivals
            self.bytes += expected
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != parity, PATIENCE):
                raise TimeoutError("a barrier was never completed: the kernel would hang")


class Barriers(list[Barrier]):
    def index(self, place: int) -> Barrier:  # type: ignore[override]
        return self[place]
