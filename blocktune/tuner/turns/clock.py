"""How launches with hooks are timed: as tuner/measure/protocol.py has it, what hooks do is not in the time."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from blocktune.kernels.tuned.settings import Cache
from blocktune.tuner.measure.protocol import FLUSH_PER_L2, HEAT_SECONDS, IDLE_SECONDS, MIN_FLUSH_BYTES, rotated

_LEAST_HEAD_START, _MAX_HEAD_START = 2, 64
"""Flushes: about 2 ms on an H200. A host that is not ahead after that is not ahead at all."""

_CALM_ROUNDS = 32
"""Rounds without a late launch after which half the head start is tried: one hiccup of the host must not slow down all
that follows."""

_FLUSHES_PER_WAIT = 16


class HookedLaunch(Protocol):
    """A launch, what must precede it, and what must follow it."""

    def before(self) -> None:
        """Prepare the arguments."""

    def run(self) -> None:
        """Launch."""

    def after(self) -> None:
        """Restore the arguments."""


class TurnClock(Protocol):
    """Takes times of launches in turns."""

    def rounds(self, launches: Sequence[HookedLaunch], count: int) -> list[tuple[float, ...]]:
        """Time every launch once a round, in rotating order; a row holds the microseconds in the order of the
        launches."""

    def synchronize(self) -> None:
        """Wait for all launches; raises what they failed with."""


class CudaTurnClock:
    """Times launches on the current CUDA device and stream by events.

    Each turn has a head start of its own: flushes that keep the GPU at work while the host enqueues the hooks, the
    events and the launch. One for a whole round would be used up after a few turns, since a launch by Triton costs the
    host more than a short kernel takes. The host waits for its own stream alone: work of other streams may wait for
    another process, which waits for this one to have tuned.
    """

    def __init__(self, l2: Cache) -> None:
        import torch

        self._torch, self._l2 = torch, l2
        size = FLUSH_PER_L2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush: Any = torch.empty(max(size, MIN_FLUSH_BYTES), dtype=torch.uint8, device="cuda")
        self._head_start = _LEAST_HEAD_START
        self._calm_rounds = 0
        self._idle_since = 0.0

    def rounds(self, launches: Sequence[HookedLaunch], count: int) -> list[tuple[float, ...]]:
        self._heat()
        return [self._round(launches, rotated(len(launches), number)) for number in range(count)]

    def synchronize(self) -> None:
        self._torch.cuda.current_stream().synchronize()
        self._idle_since = time.monotonic()

    def _heat(self) -> None:
        """Load a GPU that has been idle, as while configs were compiled: a cold one runs at another clock."""
        end = time.monotonic() + HEAT_SECONDS
        if end - HEAT_SECONDS < self._idle_since + IDLE_SECONDS:
            return
        while time.monotonic() < end:
            self._work(_FLUSHES_PER_WAIT)
            self.synchronize()

    def _work(self, flushes: int) -> None:
        """Keep the GPU at work, which leaves nothing of the arguments in its L2 cache."""
        for _ in range(flushes):
            self._flush.zero_()

    def _round(self, launches: Sequence[HookedLaunch], order: Sequence[int]) -> tuple[float, ...]:
        """Return one round, taken again with a longer head start while the GPU catches up with the host."""
        while True:
            times, late = self._attempt(launches, order)
            if not late or self._head_start >= _MAX_HEAD_START:
                self._grow_calm(late)
                return times
            self._head_start *= 2
            self._calm_rounds = 0

    def _grow_calm(self, late: bool) -> None:
        """Count a round, and halve the head start after many without a late launch."""
        self._calm_rounds = 0 if late else self._calm_rounds + 1
        if self._calm_rounds >= _CALM_ROUNDS:
            self._head_start = max(_LEAST_HEAD_START, self._head_start // 2)
            self._calm_rounds = 0

    def _attempt(self, launches: Sequence[HookedLaunch], order: Sequence[int]) -> tuple[tuple[float, ...], bool]:
        event = self._torch.cuda.Event
        spans = [(event(enable_timing=True), event(enable_timing=True)) for _ in launches]
        late = False
        for index in order:
            launch, (start, end) = launches[index], spans[index]
            launch.before()
            self._work(self._head_start)
            if self._l2 == "warm":
                launch.run()
            start.record()
            launch.run()
            end.record()
            late = start.query() or late
            launch.after()
        self.synchronize()
        return tuple(1e3 * start.elapsed_time(end) for start, end in spans), late
