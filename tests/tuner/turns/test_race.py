"""Which config wins, and how often each is timed."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from blocktune.kernels.tuned.config import UserConfig
from blocktune.tuner.turns.race import FINAL_ROUNDS, STAGES, Samples, race


def configs(count: int) -> list[UserConfig]:
    return [UserConfig("m:f", (("BLOCK", number),)) for number in range(count)]


class Gpu:
    """Times configs with noise that is common to a round, and some of their own; counts rounds."""

    def __init__(
        self, times_us: Sequence[float], noise: float = 0.0, seed: int = 0, broken: Sequence[int] = ()
    ) -> None:
        self.times_us, self.noise, self.broken = times_us, noise, broken
        self.random, self.rounds = random.Random(seed), Counter[int]()

    def __call__(self, entered: Sequence[UserConfig], count: int) -> Mapping[UserConfig, Samples]:
        found: dict[UserConfig, list[float]] = {config: [] for config in entered}
        for _ in range(count):
            heat = 1 + 0.05 * self.random.random()
            for config, samples in found.items():
                number = int(config.parameters["BLOCK"] or 0)
                self.rounds[number] += 1
                samples.append(self.times_us[number] * heat * (1 + self.random.gauss(0, self.noise)))
        return {
            config: tuple(samples) for config, samples in found.items() if config.parameters["BLOCK"] not in self.broken
        }


def test_the_fastest_wins_and_slow_ones_get_few_rounds() -> None:
    gpu, entered = Gpu([200, 150, 100, 110, 104]), configs(5)
    standing = race(entered, gpu)
    assert standing is not None
    assert standing.winner == entered[2]
    assert standing.time_us(entered[2]) == pytest.approx(100, rel=0.06)
    assert [gpu.rounds[number] for number in (0, 1)] == [STAGES[0][0]] * 2
    assert gpu.rounds[3] == STAGES[0][0] + STAGES[1][0]
    assert gpu.rounds[4] == gpu.rounds[2] == STAGES[0][0] + STAGES[1][0] + FINAL_ROUNDS[1]


def test_of_equals_the_first_in_the_list_wins_whatever_the_noise() -> None:
    winners = Counter()
    for seed in range(30):
        standing = race(configs(4), Gpu([100.05, 100.0, 100.1, 103.0], noise=0.002, seed=seed))
        assert standing is not None
        winners[standing.winner.parameters["BLOCK"]] += 1
    assert winners[0] >= 27


def test_slow_kernels_are_timed_less_often() -> None:
    gpu = Gpu([50_000.0, 51_000.0])
    race(configs(2), gpu)
    assert gpu.rounds[0] == STAGES[0][0] + STAGES[1][0] + FINAL_ROUNDS[0]


def test_what_does_not_run_cannot_win() -> None:
    standing = race(configs(3), Gpu([1.0, 2.0, 3.0], broken=[0]))
    assert standing is not None
    assert standing.winner == configs(3)[1]
    assert race(configs(2), Gpu([1.0, 2.0], broken=[0, 1])) is None
    assert race([], Gpu([])) is None
