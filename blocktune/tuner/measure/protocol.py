"""How a time is taken: the measuring protocol, version 2.

1. Clocks are warm: a GPU that was idle is loaded for a stretch of wall time before timing, since a cold GPU runs at
   another clock than a loaded one.
2. The L2 cache is flushed before every timed launch by writing a buffer of at least twice its size, outside the timed
   region, so that no candidate profits from what the last one left there.
3. A launch is timed by a pair of CUDA events around it and nothing else. The host must have enqueued the launch before
   the GPU reaches the first event, or the host's launch cost would count: each round starts with a head start of
   flushes, the host checks afterwards that it stayed ahead, and a round in which it did not is taken again with twice
   the head start.
4. Candidates are never timed alone. A round times every contender once, in an order that rotates from round to round;
   a candidate's contender is the anchor config, finalists contend with each other. Heat and power move the clock by
   5-10 %, but they move both sides of a round, so the ratio inside a round is what is compared.
5. The time of a config is the median of its rounds; its `relative_to_anchor` is the median of the rounds' ratios.
6. The regime (`Regime` in db/records/records.py) says whether the GPU may rest: in bursts it does before every round,
for too
   short a time for its clocks to fall, and what decides is timed without heating up first; under sustained load it has
   worked for a second before what decides is timed, and nothing rests. The regime is part of a time's identity.
   `tune bench` compares under a load that never pauses (`CudaClock.loaded_rounds`), because contenders that differ in
   power would otherwise let the clock recover, and records clock and power of the whole measurement in every row. In a
   comparison every contender follows every other one equally often (`balanced`): after one that draws little power the
   clock is higher for some milliseconds, which would favour whoever always came next.
7. Candidates race: one that is clearly slower than the best so far in its first rounds gets no further ones. A sweep,
   which is to know every config equally well, has no race.

Whoever changes any of this increases `PROTOCOL_VERSION`: times of different versions are not comparable. Version 1 had
no race; a candidate that took twice the anchor's time got two rounds. Its finals were the same.
"""

import collections
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blocktune.db.records.records import Regime
from blocktune.kernels.base.kernel import Thunk

PROTOCOL_VERSION = 2

IDLE_SECONDS = 0.03
"""After so long without a launch the clocks may have fallen."""

HEAT_SECONDS = 0.05
"""Load before a candidate's rounds; the anchor takes part in them, so it need not reach the final temperature."""

FINAL_HEAT_SECONDS = {Regime.BURST: 0.05, Regime.SUSTAINED: 1.0}
"""Load before the finalists' rounds, which decide."""

LOAD_SECONDS = (2.0, 3.0)
"""Unbroken load before and during the rounds of a comparison under sustained load. The power limit holds the clock
after about a second."""

REST_SECONDS = 0.01
"""Rest before every round of a burst; too short for the clocks to fall."""

DEFAULT_REGIME = Regime.SUSTAINED
"""What attention works under in training and in a server that is worth its GPU; docs/models/search.md has the
figures."""

CANDIDATE_US = 25_000.0
"""Timed GPU time of one candidate, its anchor launches not counted."""

CANDIDATE_ROUNDS = (5, 30)
FINAL_US = 3_000_000.0
FINAL_ROUNDS = (15, 150)

RACE_ROUNDS = 2
"""Rounds that every candidate gets."""

RACE_MARGIN = 1.15
"""A candidate this many times slower than the best so far is stopped. `tune replay` counts what other margins would
save and lose: on the recorded shapes this one stopped no config within 2 % of the best, while 1.1 did. It must also
exceed the band of the finals, which take in who is nearly as fast (tuner/search/finals.py)."""

FLUSH_PER_L2 = 2
MIN_FLUSH_BYTES = 64 << 20
_MAX_HEAD_START = 256
MIN_LOADED_ROUNDS = 9

Rounds = tuple[tuple[float, ...], ...]
"""Times in microseconds: one row per round, one column per contender."""


class Clock(Protocol):
    """Takes times of launches."""

    def heat(self, launch: Thunk, seconds: float) -> None:
        """Repeat the launch for at least this long, then wait for it."""

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        """Time every launch once per round, in rotating order, each with a cold L2 cache."""

    def loaded_rounds(self, launches: Sequence[Thunk], seconds: float) -> Rounds:
        """Time every launch once per round for this long, without a pause in the work of the GPU."""

    def synchronize(self) -> None:
        """Wait for all launches; raises what they failed with."""


def candidate_rounds(time_us: float) -> int:
    """Return the rounds that a candidate gets unless it is stopped, by the time of one of its launches."""
    return _clamp(CANDIDATE_US / time_us, CANDIDATE_ROUNDS)


def stopped_early(samples_us: Sequence[float]) -> bool:
    """Return whether these are the rounds of a candidate that lost its race: it has fewer than any other can have."""
    return 0 < len(samples_us) < CANDIDATE_ROUNDS[0]


def is_behind(score: float, best: float, margin: float = RACE_MARGIN) -> bool:
    """Return whether a candidate with this score after its first rounds has lost its race against the best so far."""
    return score > margin * best


def final_rounds(times_us: Sequence[float]) -> int:
    """Return the rounds of the finals, by the time of one launch of every finalist."""
    return _clamp(FINAL_US / sum(times_us), FINAL_ROUNDS)


def _clamp(count: float, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], int(count)))


def column(rounds: Rounds, contender: int) -> tuple[float, ...]:
    """Return one contender's times in the order of the rounds, in microseconds."""
    return tuple(row[contender] for row in rounds)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio inside a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def timed_rounds(clock: Clock, launches: Sequence[Thunk], count: int, regime: Regime) -> Rounds:
    """Return the rounds of a regime, in rotating order."""
    if regime is Regime.SUSTAINED:
        return clock.rounds(launches, count)
    return tuple(rested_round(clock, launches, rotated(len(launches), number)) for number in range(count))


def rested_round(clock: Clock, launches: Sequence[Thunk], order: Sequence[int]) -> tuple[float, ...]:
    """Return one round after a rest, taken in this order; the times stand in the order of the launches."""
    time.sleep(REST_SECONDS)
    (times,) = clock.rounds([launches[index] for index in order], 1)
    return tuple(time_us for _, time_us in sorted(zip(order, times, strict=True)))


def rotated(count: int, start: int) -> tuple[int, ...]:
    """Return the numbers 0..count-1, starting at `start` modulo count."""
    return tuple((start + step) % count for step in range(count))


def balanced(count: int, number: int) -> tuple[int, ...]:
    """Return the numbers 0..count-1 in the order of a round, by the number of the round.

    In `count` rounds, or twice as many for an odd count, each number comes right after each other one equally often (a
    Williams square).
    """
    steps = (step // 2 + 1 if step % 2 else -(step // 2) for step in range(count))  # 0, 1, -1, 2, -2
    order = tuple((number + step) % count for step in steps)
    return order[::-1] if count % 2 and number // count % 2 else order


class CudaClock:
    """Times launches on the current CUDA device and stream by events."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        size = max(FLUSH_PER_L2 * l2_bytes, MIN_FLUSH_BYTES)
        self._flush: Any = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._head_start = 4

    def heat(self, launch: Thunk, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(4):
                launch()
            self.synchronize()

    def rounds(self, launches: Sequence[Thunk], count: int) -> Rounds:
        return tuple(self._round(launches, rotated(len(launches), number)) for number in range(count))

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def loaded_rounds(self, launches: Sequence[Thunk], seconds: float) -> Rounds:
        """Time every launch once per round for this long, without a pause in the work of the GPU.

        Every round begins with an untimed one, which keeps the load up while the host enqueues the rest. The host waits
        for a round only after it has enqueued the next one. A round in which the GPU still caught up with the host is
        left out, and the rounds after it get a longer head start of flushes.
        """
        rounds: list[tuple[float, ...]] = []
        waiting: collections.deque[_Round] = collections.deque()
        flushes, end = 0, time.monotonic() + seconds
        for number in itertools.count():
            if time.monotonic() >= end and len(rounds) >= MIN_LOADED_ROUNDS:
                break
            waiting.append(self._enqueue(launches, balanced(len(launches), number), flushes))
            if waiting[-1].late:
                flushes = min(2 * flushes or 1, _MAX_HEAD_START)
            if len(waiting) > 1:
                rounds += waiting.popleft().finished()
        return (*rounds, *(times for each in waiting for times in each.finished()))

    def _enqueue(self, launches: Sequence[Thunk], order: Sequence[int], flushes: int) -> "_Round":
        """Enqueue an untimed round, a head start and a timed round."""
        for index in order:
            launches[index]()
        for _ in range(flushes):
            self._flush.zero_()
        event = self._torch.cuda.Event
        spans = [(event(enable_timing=True), event(enable_timing=True)) for _ in launches]
        late = self._timed(launches, order, spans)
        return _Round(spans=spans, last=spans[order[-1]][1], late=late, counts=not late or flushes == _MAX_HEAD_START)

    def _round(self, launches: Sequence[Thunk], order: Sequence[int]) -> tuple[float, ...]:
        while True:
            times, late = self._attempt(launches, order)
            if not late or self._head_start >= _MAX_HEAD_START:
                return times
            self._head_start *= 2

    def _attempt(self, launches: Sequence[Thunk], order: Sequence[int]) -> tuple[tuple[float, ...], bool]:
        """Return one round and whether the GPU caught up with the host, so that the host's time leaked in."""
        event = self._torch.cuda.Event
        spans = [(event(enable_timing=True), event(enable_timing=True)) for _ in launches]
        for _ in range(self._head_start):
            self._flush.zero_()
        late = self._timed(launches, order, spans)
        self.synchronize()
        return tuple(1e3 * start.elapsed_time(end) for start, end in spans), late

    def _timed(self, launches: Sequence[Thunk], order: Sequence[int], spans: Sequence[tuple[Any, Any]]) -> bool:
        """Enqueue every launch between its events, after a flush; return whether the GPU caught up with the host."""
        late = False
        for index in order:
            start, end = spans[index]
            self._flush.zero_()
            start.record()
            launches[index]()
            end.record()
            late = start.query() or late
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

    def finished(self) -> list[tuple[float, ...]]:
        """Wait for the round and return its times in microseconds, or nothing if it does not count."""
        self.last.synchronize()
        return [tuple(1e3 * start.elapsed_time(end) for start, end in self.spans)] if self.counts else []
