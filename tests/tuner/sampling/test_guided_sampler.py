"""`GuidedSampler` with studies of anybody: it follows a prior, corrects it, and asks for nothing twice."""

from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from blocktune import GuidedSampler
from blocktune.kernels.values.errors import UsageError

pytestmark = pytest.mark.triton_free

SPACE: dict[str, BaseDistribution] = {
    "kernel": CategoricalDistribution(("plain", "pipelined")),
    "block": CategoricalDistribution((16, 32, 64, 128, 256)),
    "stages": IntDistribution(1, 5),
}
POINTS = 2 * 5 * 5


def time_us(params: Any) -> float:
    off = abs((16, 32, 64, 128, 256).index(params["block"]) - 3) + abs(params["stages"] - 4)
    return (100.0 if params["kernel"] == "pipelined" else 120.0) * 1.1**off


def flat(params: Any) -> float:
    return 100.0


def upside_down(params: Any) -> float:
    return 1e4 / time_us(params)


def studied(prior: Callable[[Any], float], trials: int, **given: Any) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = given.pop("direction", "minimize")
    study = optuna.create_study(direction=direction, sampler=GuidedSampler(prior, **{"search_space": SPACE} | given))
    study.optimize(lambda trial: objective(trial, direction), n_trials=trials)
    return study


def objective(trial: optuna.Trial, direction: str) -> float:
    params = {
        "kernel": trial.suggest_categorical("kernel", ("plain", "pipelined")),
        "block": trial.suggest_categorical("block", (16, 32, 64, 128, 256)),
        "stages": trial.suggest_int("stages", 1, 5),
    }
    return time_us(params) if direction == "minimize" else 1e6 / time_us(params)


def asked(study: optuna.Study) -> list[tuple[tuple[str, Any], ...]]:
    return [tuple(sorted(trial.params.items())) for trial in study.trials]


def test_a_right_prior_is_followed_from_the_first_trial_on() -> None:
    study = studied(time_us, 5)
    assert study.trials[0].value == study.best_value == 100.0
    assert max(trial.value or 0.0 for trial in study.trials) <= 121.0


@pytest.mark.parametrize("prior", [flat, upside_down])
def test_a_useless_prior_is_corrected(prior: Callable[[Any], float]) -> None:
    study = studied(prior, 25)
    assert study.best_value <= 110.0


def test_high_values_can_be_the_good_ones() -> None:
    study = studied(lambda params: 1e6 / time_us(params), 2, direction="maximize")
    assert study.trials[0].value == study.best_value == 1e4


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_values_need_not_have_the_unit_of_the_prior(unit: float) -> None:
    assert asked(studied(lambda params: unit * time_us(params), 10)) == asked(studied(time_us, 10))


def test_nothing_is_asked_for_twice_and_all_in_the_end() -> None:
    study = studied(upside_down, POINTS)
    assert len(set(asked(study))) == POINTS
    study.optimize(lambda trial: objective(trial, "minimize"), n_trials=1)  # what is best is asked for again
    assert len(set(asked(study))) == POINTS


def test_equal_seeds_ask_alike() -> None:
    ranges = {"x": FloatDistribution(1e-3, 1e3, log=True), "y": FloatDistribution(-1.0, 1.0)}

    def run(seed: int) -> list[tuple[tuple[str, Any], ...]]:
        sampler = GuidedSampler(lambda params: 1.0, search_space=ranges, seed=seed)
        study = optuna.create_study(sampler=sampler)
        study.optimize(
            lambda trial: 1.0 + trial.suggest_float("x", 1e-3, 1e3, log=True) + trial.suggest_float("y", -1, 1) ** 2, 8
        )
        return asked(study)

    assert run(0) == run(0) != run(1)


def test_only_the_given_points_are_asked_for() -> None:
    points = [{"kernel": "plain", "block": 64, "stages": 2}, {"kernel": "pipelined", "block": 128, "stages": 4}]
    study = studied(flat, 2, points=points)
    assert [trial.params for trial in study.trials] == points
    with pytest.raises(UsageError, match="need a `search_space`, but got None"):
        GuidedSampler(flat, points=points)


def test_without_a_search_space_it_is_that_of_the_finished_trials() -> None:
    study = studied(time_us, 6, search_space=None, seed=0)
    assert study.trials[1].value == 100.0  # the first is drawn


def test_trials_of_others_teach_too_and_are_not_repeated() -> None:
    own = studied(upside_down, 12)
    others = optuna.create_study(sampler=GuidedSampler(upside_down, search_space=SPACE))
    others.add_trials(own.trials)
    others.optimize(lambda trial: objective(trial, "minimize"), n_trials=3)
    own.optimize(lambda trial: objective(trial, "minimize"), n_trials=3)
    assert asked(others) == asked(own)


def test_a_pruned_trial_teaches_by_its_last_value_and_an_infeasible_one_nothing() -> None:
    place = {"kernel": "plain", "block": 128, "stages": 4}
    distributions = {name: SPACE[name] for name in place}

    def second(**trial: Any) -> dict[str, Any]:
        study = optuna.create_study(sampler=GuidedSampler(flat, search_space=SPACE))
        study.add_trial(create_trial(params={**place, "kernel": "pipelined"}, distributions=distributions, value=100.0))
        study.add_trial(create_trial(params=place, distributions=distributions, **trial))
        return study.ask(SPACE).params

    unknown = second(state=TrialState.PRUNED)
    assert second(value=1.0, constraints={"runs": 1.0}) == unknown != second(value=1.0)
    slow = second(state=TrialState.PRUNED, intermediate_values={0: 400.0}, value=400.0)
    assert slow == second(value=400.0)
    assert (slow["kernel"], unknown["kernel"]) == ("pipelined", "plain")


def test_a_failed_point_is_asked_for_again_but_not_without_end() -> None:
    study = optuna.create_study(sampler=GuidedSampler(time_us, search_space=SPACE))
    for _ in range(5):
        study.tell(study.ask(SPACE), state=TrialState.FAIL)
    points = asked(study)
    assert points[0] == points[1] == points[2] != points[3]


def test_a_better_prediction_of_one_point_counts() -> None:
    sampler = GuidedSampler(time_us, search_space=SPACE)
    study = optuna.create_study(sampler=sampler)
    found = {"kernel": "plain", "block": 16, "stages": 1}
    best = {"kernel": "pipelined", "block": 128, "stages": 4}
    assert sampler.prefer(study, [found, best]) == 1
    sampler.revise(found, 1.0)
    assert sampler.prefer(study, [found, best]) == 0
    assert study.ask(SPACE).params == found
    with pytest.raises(UsageError, match="is not in the sampler's search space"):
        sampler.prefer(study, [{"kernel": "other"}])


def test_values_that_have_no_ratio_are_refused() -> None:
    with pytest.raises(UsageError, match="must be positive"):
        studied(lambda params: 0.0, 1)
