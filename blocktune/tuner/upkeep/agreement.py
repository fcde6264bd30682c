"""Whether searches agree: their winners of one shape and the default, timed against each other afterwards.

found = rematch([best.config for best in bests_of_ten_searches], default, runner)
found.agreeing      # 9: this many searches found the most frequent winner, or one that is as fast
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blocktune.db.records.records import Outcome
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.measure.protocol import TIE_BAND
from blocktune.tuner.measure.runner import Runner
from blocktune.tuner.search.verdict import speedup

RoundsByConfig = Mapping[KernelConfig, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rematch:
    """The rematch of several searches' winners.

    winners: how many searches each config won, the most frequent first, of equally frequent ones the fastest.
    samples_us: rounds of the finals, paired. failures: winners that did not run any more, with the reason.
    disturbance: what disturbed the finals.
    """

    winners: Mapping[KernelConfig, int]
    default: KernelConfig
    samples_us: RoundsByConfig
    failures: Mapping[KernelConfig, str]
    disturbance: str

    @property
    def searches(self) -> int:
        return sum(self.winners.values())

    @property
    def reference(self) -> KernelConfig:
        """The most frequent winner."""
        return next(iter(self.winners))

    @property
    def agreeing(self) -> int:
        """How many searches found the most frequent winner, or one within the tie band of it."""
        return sum(
            count
            for config, count in self.winners.items()
            if config in self.samples_us and abs(self.over(config, self.reference) - 1) <= TIE_BAND
        )

    @property
    def slower_than_default(self) -> int:
        """How many searches found a winner that the default beats beyond the noise, or that does not run."""
        default_us = self.samples_us[self.default]
        return sum(
            count
            for config, count in self.winners.items()
            if config not in self.samples_us or speedup(self.samples_us[config], default_us).beyond_noise
        )

    @property
    def slowest(self) -> float:
        """The slowest winner's time over the fastest one's."""
        timed = [config for config in self.winners if config in self.samples_us]
        fastest = min(timed, key=lambda config: statistics.median(self.samples_us[config]))
        return max(self.over(config, fastest) for config in timed)

    def over(self, config: KernelConfig, other: KernelConfig) -> float:
        """Return the median over the rounds of one config's time over another's."""
        return speedup(self.samples_us[config], self.samples_us[other]).median

    def to_json(self) -> dict[str, Any]:
        return {
            "searches": self.searches,
            "agreeing": self.agreeing,
            "slower_than_default": self.slower_than_default,
            "slowest": round(self.slowest, 5),
            "winners": [self._entry(config) | {"searches": count} for config, count in self.winners.items()],
            "default": self._entry(self.default),
            "disturbance": self.disturbance,
        }

    def _entry(self, config: KernelConfig) -> dict[str, Any]:
        timed = config in self.samples_us
        return {
            "config": config.to_json(),
            "label": config.label,
            "time_us": round(statistics.median(self.samples_us[config]), 3) if timed else None,
            "over_default": round(self.over(config, self.default), 5) if timed else None,
            "problem": self.failures.get(config, ""),
        }


def rematch(winners: Sequence[KernelConfig], default: KernelConfig, runner: Runner) -> Rematch:
    """Check the default and all winners, one a search, and time those that pass in one run of finals.

    Raises:
        NoFeasibleConfigError: the default, or the most frequent winner, does not run.
    """
    failures: dict[KernelConfig, str] = {}
    for config in dict.fromkeys((default, *winners)):
        found = runner.measure(config)
        if found.outcome is not Outcome.OK:
            failures[config] = found.error
    able = [config for config in dict.fromkeys((default, *winners)) if config not in failures]
    finals = runner.finals(able)
    failures |= {config: failed.error for config, failed in finals.failures.items()}
    ordered = _rank_by_frequency(winners, finals.samples_us)
    for config in (default, next(iter(ordered))):
        if config not in finals.samples_us:
            raise NoFeasibleConfigError(
                f"The default and the most frequent winner must run, but {config.label} does not: "
                f"{failures.get(config, 'the worker was lost')}. Tune again by `tune run`."
            )
    return Rematch(
        winners=ordered,
        default=default,
        samples_us=finals.samples_us,
        failures=failures,
        disturbance=finals.disturbance,
    )


def _rank_by_frequency(winners: Sequence[KernelConfig], samples_us: RoundsByConfig) -> dict[KernelConfig, int]:
    def place(entry: tuple[KernelConfig, int]) -> tuple[int, float]:
        config, count = entry
        return -count, statistics.median(samples_us[config]) if config in samples_us else float("inf")

    return dict(sorted(Counter(winners).items(), key=place))
