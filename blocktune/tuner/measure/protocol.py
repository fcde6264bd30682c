"""How a time is taken: the measuring protocol, version 2.

1. Clocks are warm: a GPU that was idle is loaded for a stretch of wall time before timing, since a cold GPU runs at
   another clock than a loaded one.
2. The L2 cache is flushed before every timed launch by writing a buffer of at least twice its size, outside the timed
   region, so that no candidate profits from what the last one left there.
3. A launch is timed by a pair of CUDA events around it and nothing else. The host must have enqueued the launch before
   the GPU reaches the first event, or the host's launch cost would count: each round starts with a head start of
   flushes, the host checks afterwards that it stayed ahead, and a round in which it did not is taken again with twice
   the head start. A launch with hooks (`HookedLaunch` in tuner/measure/clock.py) has a head start of its own, between
   the hook that prepares its arguments and the first event.
4. Candidates are never timed alone. A round times every contender once, in an order that rotates from round to round;
   a candidate's contender is the anchor config, finalists contend with each other. Heat and power move the clock by
   5-10 %, but they move both sides of a round, so the ratio inside a round is what is compared.
5. The time of a config is the median of its rounds; its `relative_to_anchor` is the median of the rounds' ratios.
6. The regime (`Regime` in db/records/records.py) says whether the GPU may rest: in bursts it does before every round,
   for too short a time for its clocks to fall, and what decides is timed without heating up first; under sustained load
   it has worked for a second before what decides is timed, and nothing rests. The regime is part of a time's identity.
   `tune bench` compares under a load that never pauses (`CudaClock.loaded_rounds`), because contenders that differ in
   power would otherwise let the clock recover, and records clock and power of the whole measurement in every row. In a
   comparison every contender follows every other one equally often (`balanced_order`): after one that draws little
   power the clock is higher for some milliseconds, which would favour whoever always came next.
7. Candidates race: one that is clearly slower than the best so far in its first rounds gets no further ones. A sweep,
   which is to know every config equally well, has no race.
8. Of contenders in the same rounds, the first in a fixed order within `TIE_BAND` of the fastest wins, by the mean of
   the middle half of their shares of a round. A ratio is beyond noise if it is so by `SETTLED` standard errors. This
   rule decides finals and the race of an autotuned call (tuner/launches/race.py); notes/models/search.md has its regret
   on recorded rounds. It changes no time, so it is no part of the version.

Whoever changes any of this increases `PROTOCOL_VERSION`: times of different versions are not comparable. Version 1 had
no race; a candidate that took twice the anchor's time got two rounds. Its finals were the same.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import truediv
from typing import TypeVar

from blocktune.db.records.records import Regime

PROTOCOL_VERSION = 2

Contender = TypeVar("Contender", bound=Hashable)

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
"""What attention works under in training and in a server that is worth its GPU; notes/models/search.md has the
figures."""

CANDIDATE_US = 25_000.0
"""Timed GPU time of one candidate, its anchor launches not counted."""

CANDIDATE_ROUNDS = (5, 30)
FINAL_US = 3_000_000.0
FINAL_ROUNDS = (15, 150)

RACE_ROUNDS = 2
"""Rounds that every candidate gets."""

RACE_MARGIN = 1.15
"""A candidate this many times slower than the best so far is stopped. `tune lab replay` counts what other margins would
save and lose: on the recorded shapes this one stopped no config within 2 % of the best, while 1.1 did. It must also
exceed the band of the finals, which take in who is nearly as fast (tuner/search/finals.py)."""

TIE_BAND = 0.005
"""Configs within half a percent of the fastest are equal: repeated finals on one GPU differ by about as much, and a
fixed order among equals makes the winner repeatable."""

SETTLED = 3.0
"""Standard errors beyond which a ratio is clearly on one side of a margin. More than usual, since a challenger is the
best of several."""

FEW_ROUNDS = 15
"""The spread of fewer rounds says little about their error (the mean of 8 is off by 3 of its standard errors in every
tenth case), so all of them must agree."""

LEAST_SETTLED_ROUNDS = 8
"""Fewer rounds settle nothing."""

Rounds = tuple[tuple[float, ...], ...]
"""Times in microseconds: one row per round, one column per contender."""


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
    """Return the number of rounds in the finals, by the time that one launch of every finalist takes."""
    return _clamp(FINAL_US / sum(times_us), FINAL_ROUNDS)


def _clamp(count: float, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], int(count)))


def column(rounds: Rounds, contender: int) -> tuple[float, ...]:
    """Return one contender's times in the order of the rounds, in microseconds."""
    return tuple(row[contender] for row in rounds)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio inside a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def rotated_order(count: int, start: int) -> tuple[int, ...]:
    """Return the numbers 0..count-1, starting at `start` modulo count."""
    return tuple((start + step) % count for step in range(count))


def balanced_order(count: int, number: int) -> tuple[int, ...]:
    """Return the numbers 0..count-1 in the order of a round, by the number of the round.

    In `count` rounds, or twice as many for an odd count, each number comes right after each other one equally often (a
    Williams square).
    """
    steps = (step // 2 + 1 if step % 2 else -(step // 2) for step in range(count))  # 0, 1, -1, 2, -2
    order = tuple((number + step) % count for step in steps)
    return order[::-1] if count % 2 and number // count % 2 else order


def middle(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the middle half of numbers, which a few disturbed rounds do not move and which is finer than
    the ticks of the GPU's clock, and its standard error, as for numbers that are normal but for the disturbed ones."""
    found, quarter = sorted(numbers), len(numbers) // 4
    kept = found[quarter : len(found) - quarter]
    return statistics.fmean(kept), 0.81 * (kept[-1] - kept[0]) / len(found) ** 0.5


def surely(ratios: Sequence[float]) -> float:
    """Return what the middle of paired ratios is at least, beyond noise."""
    if len(ratios) < FEW_ROUNDS:
        return min(ratios) if len(ratios) >= LEAST_SETTLED_ROUNDS else -math.inf
    mean, error = middle(ratios)
    return mean - SETTLED * error


def is_slower(own: Sequence[float], other: Sequence[float], margin: float) -> bool:
    """Return whether times are clearly more than others times a margin, round by round."""
    return surely([mine / theirs for mine, theirs in zip(own, other, strict=True)]) > margin


def shares(timed: Mapping[Contender, Sequence[float]]) -> dict[Contender, float]:
    """Return each contender's time over what is usual in the rounds, in which all of them took part."""
    usual = [statistics.fmean(row) for row in zip(*timed.values(), strict=True)]
    return {contender: middle(list(map(truediv, samples, usual)))[0] for contender, samples in timed.items()}


def within(timed: Mapping[Contender, Sequence[float]], order: Iterable[Contender], margin: float) -> list[Contender]:
    """Return the contenders that took part and are within a margin of the best one, in their order."""
    found = shares(timed)
    return [each for each in order if each in found and found[each] <= margin * min(found.values())]
