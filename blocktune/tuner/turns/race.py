"""Which of some configs is fastest: rounds in which all take turns, and fewer take part from stage to stage.

In a round every config is timed once, so heat and other work of the GPU meet all alike; what counts is a config's share
of each round. A config that is clearly slower than the best after a stage gets no further rounds, and those that are
left get more. Of configs within a margin of the best the first one in the list wins, so that two races agree. Whether
they do depends on the configs close to the margin: the last stage goes on with these alone, until noise can no longer
change the winner. Most races reach that after a few rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv

from blocktune.kernels.tuned.config import UserConfig

TIE = 1.007
"""Configs this close to the best are equally fast."""

STAGES = ((3, 1.25), (5, 1.1))
"""Rounds of a stage at most, and how many times slower than the best a config may be to go on, by all rounds so far.
Launches of 30 us differ by 2.5 %, and the best one of 25 configs after eight rounds is so by luck as well: a narrower
margin would leave out the winner of one race in ten."""

LAST_ROUNDS = 4000
"""Rounds of the last stage at most."""

LAST_SECONDS = 2.0
"""The last stage begins no batch of rounds after this long: where the host is slow, rounds wait for it."""

BATCH = 40
"""Rounds after which the last stage looks what is settled: fewer say too little of how much they differ."""

SETTLED = 3.0
"""Standard errors between a config and the margin beyond which it is clearly on one side."""

STAGE_US = 300_000.0
"""GPU time of the launches of a stage."""

LEAST_ROUNDS = 9
"""Rounds that a stage has whatever they take, unless it has fewer anyway."""

Samples = tuple[float, ...]

TimeRounds = Callable[[Sequence[UserConfig], int], Mapping[UserConfig, Samples]]
"""Times configs in turns for some rounds; leaves out those that failed."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The end of a race. samples_us: of every config that ran: of the last stage if it took part in that, else of those
    before."""

    winner: UserConfig
    samples_us: Mapping[UserConfig, Samples]

    def time_us(self, config: UserConfig) -> float:
        """Return the median of a config's rounds."""
        return statistics.median(self.samples_us[config])


def race(configs: Sequence[UserConfig], time_rounds: TimeRounds) -> Standing | None:
    """Return the fastest of some configs, which stand in the order of the list; None if none of them runs."""
    samples: dict[UserConfig, Samples] = {}
    left = list(configs)
    for rounds, margin in STAGES:
        timed = time_rounds(left, _affordable(rounds, [samples[config] for config in left if config in samples]))
        samples |= {config: samples.get(config, ()) + found for config, found in timed.items()}
        left = _within({config: samples[config] for config in timed}, left, margin)
        if len(left) <= 1:
            return Standing(left[0], samples) if left else None
    left, timed = _last_stage(left, _affordable(LAST_ROUNDS, [samples[config] for config in left]), time_rounds)
    left = _within({config: timed[config] for config in left}, left, TIE)
    return Standing(left[0], samples | timed) if left else None


def _last_stage(
    order: Sequence[UserConfig], rounds: int, time_rounds: TimeRounds
) -> tuple[list[UserConfig], dict[UserConfig, Samples]]:
    """Return the configs that took part to the end, which is where the winner is settled, or the rounds or the time are
    over, and the times of all."""
    samples: dict[UserConfig, Samples] = {}
    open_, end = list(order), time.monotonic() + LAST_SECONDS
    while True:
        timed = time_rounds(open_, min(rounds, BATCH))
        samples |= {config: samples.get(config, ()) + found for config, found in timed.items()}
        rounds -= BATCH
        left = [config for config in open_ if config in timed]
        open_ = _undecided(left, samples)
        if len(open_) <= 1 or rounds <= 0 or time.monotonic() >= end:
            return left, samples


def _undecided(order: Sequence[UserConfig], samples: Mapping[UserConfig, Samples]) -> list[UserConfig]:
    """Return the configs on which the winner depends: those that may be the first within the margin, and those that may
    be the fastest, from which the margin counts. A settled winner stands alone."""
    found = shares({config: samples[config] for config in order})
    if not found:
        return []
    best = samples[min(found, key=found.__getitem__)]
    first = list[UserConfig]()
    for config in order:
        if not _is_slower(samples[config], best, TIE):
            first.append(config)
            if _is_slower(best, samples[config], 1 / TIE):
                break
    if len(first) == 1:
        return first
    return [config for config in order if config in first or not _is_slower(samples[config], best, 1.0)]


def _is_slower(own: Samples, other: Samples, margin: float) -> bool:
    """Return whether times are clearly more than others times a margin, round by round."""
    middle, error = _middle([mine / theirs - margin for mine, theirs in zip(own, other, strict=True)])
    return middle > SETTLED * error


def _within(timed: Mapping[UserConfig, Samples], order: Sequence[UserConfig], margin: float) -> list[UserConfig]:
    """Return the configs that are within a margin of the best one, in their order."""
    found = shares(timed)
    return [config for config in order if config in found and found[config] <= margin * min(found.values())]


def shares(timed: Mapping[UserConfig, Samples]) -> dict[UserConfig, float]:
    """Return the time of each config as a part of what is usual in the rounds, which all of them took part in."""
    usual = [statistics.fmean(row) for row in zip(*timed.values(), strict=True)]
    return {config: _middle(list(map(truediv, samples, usual)))[0] for config, samples in timed.items()}


def _middle(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the middle half of numbers, which a few disturbed rounds do not move and which is finer than
    the ticks of the GPU's clock, and its standard error, as for numbers that are normal but for the disturbed ones."""
    found, quarter = sorted(numbers), len(numbers) // 4
    middle = found[quarter : len(found) - quarter]
    return statistics.fmean(middle), 0.81 * (middle[-1] - middle[0]) / len(found) ** 0.5


def _affordable(rounds: int, known: Sequence[Samples]) -> int:
    """Return how many rounds a stage has of configs with these times."""
    total_us = sum(map(statistics.median, known))
    return min(rounds, max(LEAST_ROUNDS, int(STAGE_US / total_us))) if known else rounds
