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
from typing import Generic

from typing_extensions import TypeVar

from blocktune.runtime.autotuned.config import LaunchConfig
from blocktune.tuner.measure.protocol import TIE_BAND, is_slower, shares, within

TIE = 1.0 + TIE_BAND

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

STAGE_US = 300_000.0
"""GPU time of the launches of a stage."""

LEAST_ROUNDS = 9
"""Rounds that a stage has whatever they take, unless it has fewer anyway."""

ConfigT = TypeVar("ConfigT", default=LaunchConfig)

Samples = tuple[float, ...]

TimeRounds = Callable[[Sequence[ConfigT], int], Mapping[ConfigT, Samples]]
"""Times configs in turns for some rounds; leaves out those that failed."""


@dataclass(frozen=True, slots=True)
class Standing(Generic[ConfigT]):
    """The end of a race. samples_us: of every config that ran: of the last stage if it took part in that, else of those
    before."""

    winner: ConfigT
    samples_us: Mapping[ConfigT, Samples]

    def time_us(self, config: ConfigT) -> float:
        """Return the median of a config's rounds."""
        return statistics.median(self.samples_us[config])


def race(configs: Sequence[ConfigT], time_rounds: TimeRounds[ConfigT]) -> Standing[ConfigT] | None:
    """Return the fastest of some configs, which stand in the order of the list; None if none of them runs."""
    samples: dict[ConfigT, Samples] = {}
    left = list(configs)
    for rounds, margin in STAGES:
        timed = time_rounds(left, _affordable(rounds, [samples[config] for config in left if config in samples]))
        samples |= {config: samples.get(config, ()) + found for config, found in timed.items()}
        left = within({config: samples[config] for config in timed}, left, margin)
        if len(left) <= 1:
            return Standing(left[0], samples) if left else None
    left, timed = _last_stage(left, _affordable(LAST_ROUNDS, [samples[config] for config in left]), time_rounds)
    left = within({config: timed[config] for config in left}, left, TIE)
    return Standing(left[0], samples | timed) if left else None


def fastest(configs: Sequence[ConfigT], time_rounds: TimeRounds[ConfigT]) -> Standing[ConfigT] | None:
    """Return the config with the least time by a bench of the kernel's own, whatever that returns: of equal ones the
    first, as under Triton. None if no config runs."""
    samples = time_rounds(configs, 1)
    return Standing(min(samples, key=lambda config: samples[config][0]), samples) if samples else None


def _last_stage(
    order: Sequence[ConfigT], rounds: int, time_rounds: TimeRounds[ConfigT]
) -> tuple[list[ConfigT], dict[ConfigT, Samples]]:
    """Return the configs that took part to the end, which is where the winner is settled, or the rounds or the time are
    over, and the times of all."""
    samples: dict[ConfigT, Samples] = {}
    open_, end = list(order), time.monotonic() + LAST_SECONDS
    while True:
        timed = time_rounds(open_, min(rounds, BATCH))
        samples |= {config: samples.get(config, ()) + found for config, found in timed.items()}
        rounds -= BATCH
        left = [config for config in open_ if config in timed]
        open_ = _undecided(left, samples)
        if len(open_) <= 1 or rounds <= 0 or time.monotonic() >= end:
            return left, samples


def _undecided(order: Sequence[ConfigT], samples: Mapping[ConfigT, Samples]) -> list[ConfigT]:
    """Return the configs on which the winner depends: those that may be the first within the margin, and those that may
    be the fastest, from which the margin counts. A settled winner stands alone."""
    found = shares({config: samples[config] for config in order})
    if not found:
        return []
    best = samples[min(found, key=found.__getitem__)]
    first = list[ConfigT]()
    for config in order:
        if not is_slower(samples[config], best, TIE):
            first.append(config)
            if is_slower(best, samples[config], 1 / TIE):
                break
    if len(first) == 1:
        return first
    return [config for config in order if config in first or not is_slower(samples[config], best, 1.0)]


def _affordable(rounds: int, known: Sequence[Samples]) -> int:
    """Return how many rounds a stage has of configs with these times."""
    total_us = sum(map(statistics.median, known))
    return min(rounds, max(LEAST_ROUNDS, int(STAGE_US / total_us))) if known else rounds
