"""A winner beats the default beyond the noise; equals are told apart by a fixed order."""

import random

import pytest

from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.search.verdict import PREDICTED_TIE, decide, decide_by_predictions, speedup

pytestmark = pytest.mark.triton_free

DEFAULT, A, B = (KernelConfig("flash_fwd", block_m, 64, 4, 2) for block_m in (64, 128, 256))
ORDER = (DEFAULT, A, B)


def rounds(scale: float, seed: int, *, spread: float = 0.01, count: int = 41) -> list[float]:
    """Times that share the drift of the clock (by round) and have noise of their own."""
    own = random.Random(seed)
    return [scale * (1 + 0.1 * index / count) * (1 + own.uniform(-spread, spread)) for index in range(count)]


def test_a_clear_winner_wins_although_the_clock_drifts_more_than_it_gains() -> None:
    verdict = decide({DEFAULT: rounds(100, 1), A: rounds(96, 2), B: rounds(99, 3)}, DEFAULT, ORDER)
    assert verdict.winner == A
    assert verdict.speedup is not None
    assert verdict.speedup.median == pytest.approx(100 / 96, rel=0.005)
    assert verdict.speedup.low <= verdict.speedup.surely <= verdict.speedup.middle <= verdict.speedup.high


def test_noise_does_not_replace_the_default() -> None:
    wins = 0
    for seed in range(200):
        samples = {config: rounds(100, 3 * seed + index, spread=0.05) for index, config in enumerate(ORDER)}
        verdict = decide(samples, DEFAULT, ORDER)
        wins += verdict.winner != DEFAULT
        assert verdict.winner == DEFAULT or verdict.speedup is not None
    assert wins <= 4


def test_a_gain_within_the_tie_band_is_none() -> None:
    exact = [100.0] * 21
    verdict = decide({DEFAULT: exact, A: [99.7] * 21}, DEFAULT, ORDER)
    assert verdict.winner == DEFAULT
    assert verdict.speedup is not None
    assert verdict.speedup.median == 1.0


def test_equals_are_told_apart_by_the_order() -> None:
    samples = {DEFAULT: [100.0] * 21, B: [90.0] * 21, A: [90.2] * 21}
    assert decide(samples, DEFAULT, ORDER).winner == A
    assert decide(samples, DEFAULT, (DEFAULT, B, A)).winner == B


def test_without_the_default_the_fastest_wins_and_no_speedup_is_claimed() -> None:
    verdict = decide({A: [90.0] * 9, B: [80.0] * 9}, DEFAULT, ORDER)
    assert verdict.winner == B
    assert verdict.speedup is None
    assert "default does not run" in verdict.reason


def test_too_few_rounds_prove_nothing() -> None:
    assert decide({DEFAULT: [100.0] * 3, A: [80.0] * 3}, DEFAULT, ORDER).winner == DEFAULT
    assert speedup([100.0] * 8, [80.0] * 8).surely == 1.25


@pytest.mark.parametrize("count", [8, 9, 14, 15, 21, 150])
def test_what_is_called_sure_is_rarely_chance(count: int) -> None:
    chance = random.Random(count)
    misses = 0
    for _ in range(1000):
        found = speedup([1.0 + 0.01 * chance.gauss(0, 1) for _ in range(count)], [1.0] * count)
        misses += found.surely > 1.0
    assert misses / 1000 < 0.02


def test_a_few_disturbed_rounds_decide_nothing() -> None:
    calm = [100.0 + 0.1 * (index % 3) for index in range(20)]
    disturbed = [90.0 + 0.1 * (index % 3) for index in range(16)] + [300.0] * 4
    assert decide({DEFAULT: calm, A: disturbed}, DEFAULT, ORDER).winner == A


def test_a_prediction_must_beat_the_default_by_more_than_the_model_can_tell() -> None:
    assert decide_by_predictions({A: 100.0, DEFAULT: 100.0 * (1 + PREDICTED_TIE)}, DEFAULT) == DEFAULT
    assert decide_by_predictions({A: 100.0, DEFAULT: 100.1 * (1 + PREDICTED_TIE)}, DEFAULT) == A
    assert decide_by_predictions({B: 101.0, A: 100.0}, DEFAULT) == A
