"""Which of some configs is fastest: rounds in which all take turns, and fewer take part from stage to stage.

In a round every config is timed once, so heat and other work of the GPU meet all alike. A config that is clearly slower
than the best after a stage gets no further rounds. Of configs that the last stage cannot tell apart the first one in
the list wins, so that two races agree.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from blocktune.kernels.tuned.config import UserConfig

STAGES = ((3, 1.25), (5, 1.06))
"""Rounds of a stage, and how many times slower than the best a config may be to go on."""

FINAL_US = 200_000.0
"""GPU time of the last stage."""

FINAL_ROUNDS = (9, 60)

TIE = 1.003
"""Configs this close to the best are equally fast."""

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
        timed = time_rounds(left, rounds)
        samples |= timed
        left = _within(timed, left, margin)
        if len(left) <= 1:
            return Standing(left[0], samples) if left else None
    timed = time_rounds(left, _final_rounds(samples[config] for config in left))
    samples |= timed
    within = _within(timed, left, TIE)
    return Standing(within[0], samples) if within else None


def _within(timed: Mapping[UserConfig, Samples], order: Sequence[UserConfig], margin: float) -> list[UserConfig]:
    """Return the configs whose median is within a margin of the best one, in their order."""
    times = {config: statistics.median(timed[config]) for config in order if config in timed}
    return [config for config, time_us in times.items() if time_us <= margin * min(times.values())]


def _final_rounds(timed: Iterable[Samples]) -> int:
    total_us = sum(statistics.median(samples) for samples in timed)
    least, most = FINAL_ROUNDS
    return max(least, min(most, int(FINAL_US / total_us)))
