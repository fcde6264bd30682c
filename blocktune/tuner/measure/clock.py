"""The clock of the measuring protocol (tuner/measure/protocol.py): times launches on a GPU by events.

A launch is a function without arguments. One that has hooks (`HookedLaunch`) is timed between them: what prepares and
restores its arguments is not in its time.
"""

import collections
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from blocktune.db.records.records import Regime
from blocktune.kernels.base.kernel import Thunk
from blocktune.tuner.measure.protocol import REST_SECONDS, Rounds, balanced_order, rotated_order

FLUSH_PER_L2 = 2
MIN_FLUSH_BYTES = 64 << 20
MIN_LOADED_ROUNDS = 9

_ROUND_HEAD_START, _MAX_ROUND_HEAD_START = 4, 256
_TURN_HEAD_START, _MAX_TURN_HEAD_START = 2, 64
"""Flushes. 64 take about 2 ms on an H200: a host that is not ahead of one launch after that is not ahead at all."""

_CALM_ROUNDS = 32
"""Rounds without a late launch after which half the head start is tried: one hiccup of the host must not slow down all
that follows."""

_LAUNCHES_PER_WAIT = 4


class HookedLaunch(ABC):
    """A launch, what must precede it, and what must follow it."""

    @abstractmethod
    def before(self) -> None:
        """Prepare the arguments."""

    @abstractmethod
    def __call__(self) -> None:
        """Launch."""

    @abstractmethod
    def after(self) -> None:
        """Restore the arguments."""


class Clock(Protocol):
    """Takes times of launches."""

    def heat(self, launch: Thunk, seconds: float) -> None:
        """Load the GPU for at least this long, then wait for it."""

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        """Time every launch once per round, in rotating order, each with a cold L2 cache."""

    def loaded_rounds(self, launches: Sequence[Thunk], seconds: float) -> Rounds:
        """Time every launch once per round for this long, without a pause in the work of the GPU."""

    def synchronize(self) -> None:
        """Wait for all launches; raises what they failed with."""


def timed_rounds(clock: Clock, launches: Sequence[Thunk], count: int, regime: Regime) -> Rounds:
    """Return the rounds of a regime, in rotating order."""
    if regime is Regime.SUSTAINED:
        return clock.rounds(launches, count)
    return tuple(rested_round(clock, launches, rotated_order(len(launches), number)) for number in range(count))


def rested_round(clock: Clock, launches: Sequence[Thunk], order: Sequence[int]) -> tuple[float, ...]:
    """Return one round after a rest, taken in this order; the times stand in the order of the launches."""
    time.sleep(REST_SECONDS)
    (times,) = clock.rounds([launches[index] for index in order], 1)
    return tuple(time_us for _, time_us in sorted(zip(order, times, strict=True)))


@dataclass(slots=True)
class _HeadStart:
    """Flushes that keep the GPU at work while the host enqueues what is timed.

    least: what it begins with. most: what it may grow to.
    """

    least: int
    most: int
    flushes: int = -1
    calm_rounds: int = 0

    def __post_init__(self) -> None:
        self.flushes = self.least

    def grow(self) -> bool:
        """Make it twice as long after a late launch; return whether it could grow."""
        self.calm_rounds = 0
        if self.flushes >= self.most:
            return False
        self.flushes = min(2 * self.flushes or 1, self.most)
        return True

    def count_calm_round(self) -> None:
        """Count a round without a late launch, and halve the head start after many of them."""
        self.calm_rounds += 1
        if self.calm_rounds >= _CALM_ROUNDS:
            self.flushes, self.calm_rounds = max(self.least, self.flushes // 2), 0


class CudaClock:
    """Times launches on the current CUDA device and stream by events.

    Launches without hooks share a head start at the beginning of a round. One with hooks has a head start of its own:
    hooks and a launch by Triton cost the host more than a short kernel takes, so that one for a whole round would be
    used up after a few turns.

    The host waits for its own stream alone: work of other streams may wait for another process, which waits for this
    one to have tuned.

    Args:
        l2: the state of the L2 cache that a launch finds; warm is that after the same launch.
    """

    def __init__(self, l2: Literal["cold", "warm"] = "cold") -> None:
        import torch

        self._torch, self._l2 = torch, l2
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        size = max(FLUSH_PER_L2 * l2_bytes, MIN_FLUSH_BYTES)
        self._buffer: Any = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._of_rounds = _HeadStart(_ROUND_HEAD_START, _MAX_ROUND_HEAD_START)
        self._of_turns = _HeadStart(_TURN_HEAD_START, _MAX_TURN_HEAD_START)

    def heat(self, launch: Thunk, seconds: float) -> None:
        """Repeat the launch for at least this long, then wait for it. Flushes stand in for a launch with hooks, which
        must not be repeated without them."""
        work = self._flush if isinstance(launch, HookedLaunch) else launch
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(_LAUNCHES_PER_WAIT):
                work()
            self.synchronize()

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        return tuple(self._round(launches, rotated_order(len(launches), number)) for number in range(count))

    def synchronize(self) -> None:
        self._torch.cuda.current_stream().synchronize()

    def loaded_rounds(self, launches: Sequence[Thunk], seconds: float) -> Rounds:
        """Time every launch once per round for this long, without a pause in the work of the GPU.

        Every round begins with an untimed one, which keeps the load up while the host enqueues the rest. The host waits
        for a round only after it has enqueued the next one. A round in which the GPU still caught up with the host is
        left out, and the rounds after it get a longer head start of flushes.
        """
        rounds: list[tuple[float, ...]] = []
        waiting: collections.deque[_Round] = collections.deque()
        start, end = _HeadStart(0, _MAX_ROUND_HEAD_START), time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() >= end and len(rounds) >= MIN_LOADED_ROUNDS:
                break
            waiting.append(self._enqueue(launches, balanced_order(len(launches), number), start))
            if waiting[-1].late:
                start.grow()
            if len(waiting) > 1:
                rounds += waiting.popleft().wait_times()
        return (*rounds, *(times for each in waiting for times in each.wait_times()))

    def _enqueue(self, launches: Sequence[Thunk], order: Sequence[int], start: _HeadStart) -> "_Round":
        """Enqueue an untimed round, a head start and a timed round."""
        for index in order:
            launches[index]()
        self._flush(start.flushes)
        spans = self._new_spans(len(launches))
        late = self._enqueue_timed(launches, order, spans)
        counts = not late or start.flushes == start.most
        return _Round(spans=spans, last=spans[order[-1]][1], late=late, counts=counts)

    def _flush(self, count: int = 1) -> None:
        """Keep the GPU at work, and leave nothing of any tensor in its L2 cache."""
        for _ in range(count):
            self._buffer.zero_()

    def _new_spans(self, count: int) -> list[tuple[Any, Any]]:
        event = self._torch.cuda.Event
        return [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]

    def _round(self, launches: Sequence[Thunk], order: Sequence[int]) -> tuple[float, ...]:
        """Return one round, taken again with a longer head start while the GPU catches up with the host."""
        hooked = any(isinstance(launch, HookedLaunch) for launch in launches)
        start = self._of_turns if hooked else self._of_rounds
        while True:
            spans = self._new_spans(len(launches))
            if not hooked:
                self._flush(start.flushes)
            late = self._enqueue_timed(launches, order, spans, self._of_turns.flushes)
            self.synchronize()
            if not late:
                start.count_calm_round()
            if not late or not start.grow():
                return tuple(1e3 * begin.elapsed_time(end) for begin, end in spans)

    def _enqueue_timed(
        self, launches: Sequence[Thunk], order: Sequence[int], spans: Sequence[tuple[Any, Any]], own_flushes: int = 1
    ) -> bool:
        """Enqueue every launch between its events, after a flush, and after its own head start if it has hooks.

        Returns:
            whether the GPU caught up with the host, so that the host's time leaked in.
        """
        late = False
        for index in order:
            launch, (start, end) = launches[index], spans[index]
            hooks = launch if isinstance(launch, HookedLaunch) else None
            if hooks is not None:
                hooks.before()
            self._flush(1 if hooks is None else own_flushes)
            if self._l2 == "warm":
                launch()
            start.record()
            launch()
            end.record()
            late = start.query() or late
            if hooks is not None:
                hooks.after()
        return late


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """A round that the GPU works on.

    spans: the events of every launch. last: the event that it ends with. late: whether the GPU caught up with the host.
    counts: whether its times do.
    """

    spans: Sequence[tuple[Any, Any]]
    last: Any
    late: bool
    counts: bool

    def wait_times(self) -> list[tuple[float, ...]]:
        """Wait for the round and return its times in microseconds, or nothing if it does not count."""
        self.last.synchronize()
        return [tuple(1e3 * start.elapsed_time(end) for start, end in self.spans)] if self.counts else []
