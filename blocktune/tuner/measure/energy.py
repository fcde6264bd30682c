"""The energy of a launch: the total-energy counter of the GPU over a burst of equal launches.

    burst = EnergyMeter(CudaQueue(), monitor.energy_j).burst(launch, time_us=120.0)
    burst.energy_mj, burst.power_w

A burst repeats one launch without a pause and without flushes of the L2 cache, whose energy would count. The counter is
that of the whole board, memory included. It moves in steps, about ten per second, so a burst is measured from one step
to another: the difference over the time between them is the power, and the energy of a launch is the power times the
time of a launch in the burst.
"""

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from blocktune.kernels.base.kernel import Thunk

BURST_SECONDS = 0.3
"""From the first step of the counter that counts to the last one, at least."""

LEAD_SECONDS = 0.1
"""Load before the first step that counts: the step before it holds some of the work of the contender before."""

STUCK_SECONDS = 1.0
"""A counter that does not move for so long is none."""

BATCH_US = 4000.0
"""GPU time of the launches that are enqueued at once; two such batches wait, so that the GPU never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """The time and energy of one burst of launches.

    energy_mj: of a launch. time_us: of a launch, without a flush before it, so that it may be under the measured time.
    """

    energy_mj: float
    time_us: float

    @property
    def power_w(self) -> float:
        """The mean power."""
        return 1e3 * self.energy_mj / self.time_us


class Queue(Protocol):
    """Takes work for a GPU."""

    def enqueue(self, launch: Thunk, count: int) -> Callable[[], bool]:
        """Enqueue the launch `count` times; what is returned says whether they are over."""

    def synchronize(self) -> None:
        """Wait for all launches; raises what they failed with."""


class CudaQueue:
    """The current stream of the current CUDA device."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def enqueue(self, launch: Thunk, count: int) -> Callable[[], bool]:
        for _ in range(count):
            launch()
        event = self._torch.cuda.Event()
        event.record()
        is_over: Callable[[], bool] = event.query
        return is_over

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Measures bursts. `energy_j` reads the counter, None where the GPU has none; `now` is the time in seconds."""

    queue: Queue
    energy_j: Callable[[], float | None]
    now: Callable[[], float] = time.perf_counter

    def burst(self, launch: Thunk, time_us: float) -> Burst | None:
        """Return what a launch takes that needs about `time_us`; None where there is no counter, or one that rests."""
        patience = STUCK_SECONDS + 4e-6 * time_us  # two batches of one long launch each
        load = _Load(self, launch, batch=max(1, round(BATCH_US / time_us)), patience_seconds=patience)
        try:
            first = load.next_step(LEAD_SECONDS)
            last = None if first is None else load.next_step(BURST_SECONDS, after=first.finished)
        finally:
            self.queue.synchronize()
        if first is None or last is None:
            return None
        power_w = (last.energy_j - first.energy_j) / (last.at_seconds - first.at_seconds)
        launch_seconds = (last.finished_at - first.finished_at) / (last.finished - first.finished)
        return Burst(energy_mj=1e3 * power_w * launch_seconds, time_us=1e6 * launch_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CounterStep:
    """A step of the counter.

    energy_j, at_seconds: what it shows after it, and since when. finished, finished_at: the launches that were over
    then, and when the last of them was seen to be.
    """

    energy_j: float
    at_seconds: float
    finished: int
    finished_at: float


@dataclass(slots=True)
class _Load:
    """Keeps a GPU at work with one launch, two batches ahead of it."""

    meter: EnergyMeter
    launch: Thunk
    batch: int
    patience_seconds: float
    finished: int = 0
    finished_at: float = 0.0
    waiting: collections.deque[Callable[[], bool]] = field(default_factory=collections.deque)

    def next_step(self, seconds: float, *, after: int = 0) -> _CounterStep | None:
        """Return the first step of the counter after these seconds and more than `after` launches; None if it rests."""
        began, before = self.meter.now(), self.meter.energy_j()
        while before is not None:
            self._keep_ahead()
            energy_j, now = self.meter.energy_j(), self.meter.now()
            waited = now - began
            if energy_j != before and energy_j is not None and waited >= seconds and self.finished > after:
                return _CounterStep(
                    energy_j=energy_j, at_seconds=now, finished=self.finished, finished_at=self.finished_at
                )
            before = energy_j if waited < seconds + self.patience_seconds else None
        return None

    def _keep_ahead(self) -> None:
        while self.waiting and self.waiting[0]():
            self.waiting.popleft()
            self.finished += self.batch
            self.finished_at = self.meter.now()
        while len(self.waiting) < 2:
            self.waiting.append(self.meter.queue.enqueue(self.launch, self.batch))
