"""Which of some configs is fastest: rounds in which all take turns, and fewer take part from stage to stage.

In a round every config is timed once, so heat and other work of the GPU meet all alike; what counts is a config's share
of each round. A config that is clearly slower than the best after a stage gets no further rounds, and those that are
left get more. Of configs that the last stage cannot tell apart the first one in the list wins, so that two races agree:
its margin is several times what noise leaves of a difference after all rounds. It ends early where noise can no longer
change the winner, which most races reach after a few rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv

from blocktune.kernels.tuned.config import UserConfig

TIE = 1.005
"""Configs this close to the best are equally fast."""

STAGES = ((3, 1.25), (5, 1.06))
"""Rounds of a stage at most, and how many times slower than the best a config may be to go on."""

LAST_ROUNDS = 400
"""Rounds of the last stage at most."""

LAST_SECONDS = 0.5
"""The last stage begins no batch of rounds after this long: where the host is slow, rounds wait for it."""

BATCH = 20
"""Rounds after which the last stage looks whether the winner is settled."""

SETTLED = 4.0
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
    """The end of a race. samples_us: of every config that ran, in the last stage that it took part in."""

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
        samples |= timed
        left = _within(timed, left, margin)
        if len(left) <= 1:
            return Standing(left[0], samples) if left else None
    timed = _last_stage(left, _affordable(LAST_ROUNDS, [samples[config] for config in left]), time_rounds)
    left = _within(timed, left, TIE)
    return Standing(left[0], samples | timed) if left else None


def _last_stage(order: Sequence[UserConfig], rounds: int, time_rounds: TimeRounds) -> dict[UserConfig, Samples]:
    """Return the times of a number of rounds, or of fewer where the winner is settled or the time is over before."""
    samples: dict[UserConfig, Samples] = dict.fromkeys(order, ())
    end = time.monotonic() + LAST_SECONDS
    while rounds > 0:
        timed = time_rounds([config for config in order if config in samples], min(rounds, BATCH))
        samples = {config: samples[config] + found for config, found in timed.items()}
        rounds -= BATCH
        if not samples or _is_settled(samples, order) or time.monotonic() >= end:
            break
    return samples


def _is_settled(timed: Mapping[UserConfig, Samples], order: Sequence[UserConfig]) -> bool:
    """Return whether further rounds would give the same winner: every config before it in the list is clearly beyond
    the margin, and it is clearly within."""
    shares = _shares(timed)
    best = min(shares, key=shares.__getitem__)
    for config in (config for config in order if config in timed):
        beyond = [(own - TIE * least) / least for own, least in zip(timed[config], timed[best], strict=True)]
        middle, error = _middle(beyond)
        if abs(middle) <= SETTLED * error:
            return False
        if middle < 0:
            return True
    return False


def _within(timed: Mapping[UserConfig, Samples], order: Sequence[UserConfig], margin: float) -> list[UserConfig]:
    """Return the configs that are within a margin of the best one, in their order."""
    shares = _shares(timed)
    return [config for config in order if config in shares and shares[config] <= margin * min(shares.values())]


def _shares(timed: Mapping[UserConfig, Samples]) -> dict[UserConfig, float]:
    """Return the time of each config as a part of what is usual in its rounds."""
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
