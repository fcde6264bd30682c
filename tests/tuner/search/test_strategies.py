"""The strategies: each tries what it should, nothing twice, and everything in the end."""

import math
from dataclasses import replace

import pytest

from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.sampling.guided_sampler import GuidedSampler
from blocktune.tuner.search.proposals import Proposals
from blocktune.tuner.search.strategies import (
    DEFAULT,
    STRATEGIES,
    installed_strategies,
    make_proposals,
    require_strategy,
)
from blocktune.tuner.search.studies import MAKERS, MOST_GUIDED
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

SPACE = replace(landscape.SPACE, feasible=landscape.SPACE.feasible[::24])
FIRST = [SPACE.feasible[7], landscape.SPACE.feasible[1], SPACE.feasible[3]]  # the second is not in the space


def right(config: KernelConfig) -> float:
    return landscape.time_us(config, 0)


def assignment(space=SPACE, usefulness=right, **changes: object) -> Assignment:
    return Assignment(**{"space": space, "first": FIRST, "usefulness": usefulness, "trials": 30, "seed": 0} | changes)


def tried(proposals: Proposals, count: int = 10_000, *, salt: int = 0) -> list[KernelConfig]:
    """What is tried one after the other, with the landscape's times as scores; every seventh cannot run."""
    found: list[KernelConfig] = []
    while len(found) < count and (config := proposals.propose()) is not None:
        assert proposals.pick({config: right(config)}) == config
        found.append(config)
        proposals.tell(config, None if len(found) % 7 == 0 else landscape.time_us(config, salt))
    return found


INSTALLED = installed_strategies()


def test_every_strategy_is_made_by_a_function() -> None:
    assert set(MAKERS) == set(STRATEGIES)


@pytest.mark.parametrize("name", [name for name in INSTALLED if not STRATEGIES[name].about.startswith("Optuna")])
def test_all_is_tried_once_and_the_named_ones_first(name: str) -> None:
    proposals = make_proposals(assignment(), name)
    order = tried(proposals)
    assert proposals.size == len(order) == len(set(order)) == len(SPACE.feasible)
    assert order[0] == FIRST[0]
    if name != "coordinate":  # which goes on from there
        assert order[1] == FIRST[2]


@pytest.mark.parametrize("name", INSTALLED)
def test_what_was_known_is_not_proposed(name: str) -> None:
    proposals = make_proposals(assignment(), name)
    known = SPACE.feasible[5:15]
    for config in known:
        proposals.recall(config, right(config))
    assert not set(tried(proposals, 6)) & set(known)


@pytest.mark.parametrize("name", INSTALLED)
def test_only_chance_depends_on_the_seed(name: str) -> None:
    orders = [tuple(tried(make_proposals(assignment(landscape.SPACE, seed=seed), name), 13)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert (orders[0] != orders[2]) == STRATEGIES[name].chance


def test_the_model_orders_before_and_after_compiling() -> None:
    proposals = make_proposals(assignment(), "model")
    order = [proposals.propose() for _ in range(10)][2:]
    assert order == sorted(order, key=right)
    assert proposals.pick({SPACE.feasible[0]: 3.0, SPACE.feasible[1]: 2.0, SPACE.feasible[2]: 2.0}) == SPACE.feasible[1]


def test_coordinate_descent_looks_next_to_the_best() -> None:
    proposals = make_proposals(assignment(space=landscape.SPACE), "coordinate")
    start = proposals.propose()
    assert start is not None
    proposals.tell(start, 1.0)
    near = proposals.propose()
    differing = [name for name, value in start.parameters.items() if near and near.parameters[name] != value]
    assert near
    assert len(differing) + (near.kernel != start.kernel) == 1


def test_guided_follows_a_good_model_and_leaves_a_bad_one() -> None:
    """Right: the best is among the first five. Upside down: after some measurements it is found all the same."""
    space = landscape.SPACE
    best = min(right(config) for config in space.feasible)
    good = tried(make_proposals(assignment(space), DEFAULT), 7)
    assert min(map(right, good)) < 1.005 * best
    wrong = make_proposals(assignment(space, usefulness=lambda config: 1e6 / right(config)), DEFAULT)
    found: list[KernelConfig] = []
    for _ in range(80):
        config = wrong.propose()
        assert config is not None
        found.append(config)
        wrong.tell(config, right(config))
    assert min(map(right, found[:3])) > 1.1 * best
    assert min(map(right, found)) < 1.02 * best


def test_guided_learns_the_factor_of_neighbours_not_the_unit() -> None:
    """Two kernels, of which the model favours one wrongly: two measurements are enough to change over."""
    tiles = [(m, n) for m in (64, 128) for n in (32, 64, 128)]
    configs = [KernelConfig(name, m, n, 4, 2) for name in ("favoured", "slow") for m, n in tiles]
    space = replace(SPACE, feasible=tuple(configs))
    model = {config: (1.0 if config.kernel == "favoured" else 1.1) * (300 - config.block_n) for config in configs}
    proposals = make_proposals(assignment(space, usefulness=model.__getitem__, first=[]))
    first = proposals.propose()
    assert first is not None
    assert first.kernel == "favoured"
    proposals.tell(first, 2e-3 * model[first])
    proposals.recall(configs[6], 1e-3 * model[configs[6]])
    following = proposals.propose()
    assert following is not None
    assert following.kernel == "slow"


def test_what_the_model_thinks_not_to_fit_comes_last_but_comes() -> None:
    hopeless = set(SPACE.feasible[:6])
    usefulness = {config: math.inf if config in hopeless else right(config) for config in SPACE.feasible}
    order = tried(make_proposals(assignment(usefulness=usefulness.__getitem__, first=[]), DEFAULT))
    assert set(order[-6:]) == hopeless


def test_an_order_is_enough_where_everything_is_tried() -> None:
    assert isinstance(make_proposals(assignment(trials=MOST_GUIDED)).study.sampler, GuidedSampler)
    proposals = make_proposals(assignment(trials=MOST_GUIDED + 1))
    assert not isinstance(proposals.study.sampler, GuidedSampler)
    assert [proposals.propose() for _ in SPACE.feasible] == assignment().by_usefulness


def test_any_sampler_of_optuna_can_be_named_by_its_path() -> None:
    name = "optuna.samplers:RandomSampler"
    orders = [tuple(tried(make_proposals(assignment(landscape.SPACE, seed=seed), name), 30)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert len(set(orders[0])) == 30
    assert type(make_proposals(assignment(), name).study.sampler).__name__ == "RandomSampler"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("annealing", "guided, model"),
        ("optuna.samplers:NoSuchSampler", "cannot be imported"),
        ("no_such_module:Sampler", "cannot be imported"),
        ("optuna.study:Study", "is not"),
    ],
)
def test_a_strategy_that_is_none_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_proposals(assignment(), name)
    with pytest.raises(UsageError, match=said):  # a run that the store answers says so too
        require_strategy(name)


def test_a_strategy_says_which_package_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktune.tuner.search.strategies.find_spec", lambda name: None)
    assert "gp" in STRATEGIES
    assert "gp" not in installed_strategies()
    with pytest.raises(UsageError, match="pip install scipy"):
        make_proposals(assignment(), "gp")
