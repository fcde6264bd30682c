"""Which of some configs is fastest: rounds in which all take turns, and fewer take part from stage to stage.

In a round every config is timed once, so heat and other work of the GPU meet all alike; what counts is a config's share
of each round. A config that is clearly slower than the best after a stage gets no further rounds, and those that are
left get more. Of configs that the last stage cannot tell apart the first one in the list wins, so that two races agree:
its margin is several times what noise leaves of a difference after all rounds.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv

from blocktune.kernels.tuned.config import UserConfig

TIE = 1.005
"""Configs this close to the best are equally fast."""

STAGES = ((3, 1.25), (5, 1.06), (400, TIE))
"""Rounds of a stage at most, and how many times slower than the best a config may be to go on."""

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
            break
    return Standing(left[0], samples) if left else None


def _within(timed: Mapping[UserConfig, Samples], order: Sequence[UserConfig], margin: float) -> list[UserConfig]:
    """Return the configs that are within a margin of the best one, in their order."""
    shares = _shares(timed)
    return [config for config in order if config in shares and shares[config] <= margin * min(shares.values())]


def _shares(timed: Mapping[UserConfig, Samples]) -> dict[UserConfig, float]:
    """Return the time of each config as a part of what is usual in its rounds: of the middle half of them the mean,
    which a few disturbed rounds do not move, and which is finer than the ticks of the GPU's clock."""
    usual = [statistics.fmean(row) for row in zip(*timed.values(), strict=True)]
    shares = {config: sorted(map(truediv, samples, usual)) for config, samples in timed.items()}
    return {
        config: statistics.fmean(found[len(found) // 4 : -(len(found) // 4) or None])
        for config, found in shares.items()
    }


def _affordable(rounds: int, known: Sequence[Samples]) -> int:
    """Return how many rounds a stage has of configs with these times."""
    total_us = sum(map(statistics.median, known))
    return min(rounds, max(LEAST_ROUNDS, int(STAGE_US / total_us))) if known else rounds
