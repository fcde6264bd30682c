"""`RacePruner` decides once, by the rule of the GPU worker."""

import optuna
import pytest
from optuna.distributions import IntDistribution

from blocktune.tuner.measure.protocol import RACE_MARGIN, RACE_ROUNDS
from blocktune.tuner.sampling.race_pruner import RacePruner

pytestmark = pytest.mark.triton_free


def stopped(*medians: float, direction: str = "minimize", best: float | None = 100.0) -> list[bool]:
    """Whether the trial is stopped after each of its rounds."""
    study = optuna.create_study(direction=direction, pruner=RacePruner())
    if best is not None:
        study.add_trial(optuna.create_trial(params={"x": 0}, distributions={"x": IntDistribution(0, 1)}, value=best))
    trial, found = study.ask(), []
    for step, median in enumerate(medians):
        trial.report(median, step)
        found.append(trial.should_prune())
    return found


def test_who_is_clearly_slower_after_the_first_rounds_is_stopped() -> None:
    slow = 100.0 * RACE_MARGIN + 0.1
    assert stopped(*[slow] * (RACE_ROUNDS + 1)) == [False] * (RACE_ROUNDS - 1) + [True, False]
    assert not any(stopped(*[100.0 * RACE_MARGIN - 0.1] * (RACE_ROUNDS + 1)))


def test_high_values_can_be_the_good_ones() -> None:
    assert stopped(*[100.0 / (RACE_MARGIN + 0.01)] * RACE_ROUNDS, direction="maximize")[-1]
    assert not any(stopped(*[200.0] * RACE_ROUNDS, direction="maximize"))


def test_the_first_trial_has_nobody_to_lose_against() -> None:
    assert not any(stopped(*[1e9] * RACE_ROUNDS, best=None))
