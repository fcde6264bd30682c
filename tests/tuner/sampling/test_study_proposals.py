"""A search as an Optuna study: what is in it, that it goes on where it ended, and that nothing infeasible is tried."""

import statistics
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from blocktune.db.records.records import Outcome, Trial
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import StoreError
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.sampling.guided_sampler import GuidedSampler
from blocktune.tuner.sampling.parameters import Parameters
from blocktune.tuner.sampling.race_pruner import RacePruner
from blocktune.tuner.sampling.study_exchange import study_of
from blocktune.tuner.sampling.study_storage import open_study, require_own, storage_url
from blocktune.tuner.search.strategies import make_proposals
from tests.support.models import landscape
from tests.tuner.search.test_search import new_search

pytestmark = pytest.mark.triton_free

SPACE = replace(landscape.SPACE, feasible=landscape.SPACE.feasible[::24])
CONFIGS = SPACE.feasible


def assignment(trials: int = 20) -> Assignment:
    return Assignment(
        space=SPACE, first=CONFIGS[3:4], usefulness=lambda config: landscape.time_us(config, 1), trials=trials
    )


def measured(config: KernelConfig, ratio: float, rounds: int = 9) -> Trial:
    samples = tuple(100.0 * ratio + number % 3 for number in range(rounds))
    return landscape.SUBJECT.trial(
        config,
        Outcome.OK,
        resources=landscape.resources_of(config),
        blocks_per_sm=2,
        predicted_us=90.0,
        time_us=statistics.median(samples),
        relative_to_anchor=ratio,
        samples_us=samples,
    )


def kept(place: Path) -> optuna.Study:
    subject = landscape.SUBJECT
    return study_of(storage_url(str(place)), subject.device, subject.environment, subject.label, Parameters(SPACE))


def test_a_study_holds_what_a_search_knows() -> None:
    proposals = make_proposals(assignment())
    assert isinstance(proposals.study.sampler, GuidedSampler)
    assert isinstance(proposals.study.pruner, RacePruner)
    first, second, third = (proposals.propose() for _ in range(3))
    assert first == CONFIGS[3]
    assert second is not None
    assert third is not None
    proposals.tell(first, 1.0, measured(first, 1.0))
    proposals.tell(second, 1.4, measured(second, 1.4, rounds=2))
    proposals.tell(third, None, landscape.SUBJECT.trial(third, Outcome.WRONG_RESULT, error="off by 0.3"))
    timed, raced, wrong = proposals.study.trials
    assert timed.params == {"kernel": first.kernel, **first.parameters}
    assert (timed.state, timed.value) == (TrialState.COMPLETE, 1.0)
    assert len(timed.intermediate_values) == 9
    assert timed.intermediate_values[8] == pytest.approx(1.0)
    resources = landscape.resources_of(first)
    assert resources is not None
    assert timed.user_attrs["registers"] == resources.registers
    assert timed.user_attrs["predicted_us"] == 90.0
    assert timed.user_attrs["blocks_per_sm"] == 2
    assert timed.constraints == {"runs": 0.0}
    assert raced.state == TrialState.PRUNED
    assert raced.value == pytest.approx(1.4)
    assert (wrong.state, wrong.value, wrong.constraints) == (TrialState.PRUNED, None, {"runs": 1.0})
    assert wrong.user_attrs["error"] == "off by 0.3"
    assert proposals.study.best_params == timed.params


@pytest.mark.parametrize("name", ["guided", "tpe", "coordinate", "optuna.samplers:RandomSampler"])
def test_what_breaks_a_rule_is_never_proposed(name: str) -> None:
    """Of two kernels that have blocks of different sizes, so that most combinations of values are no config."""
    tiles = [("a", 16), ("a", 32), ("a", 64), ("b", 64), ("b", 128), ("b", 256)]
    configs = tuple(KernelConfig(kernel, m, 64, 4, stages) for kernel, m in tiles for stages in (1, 2, 3))
    mixed = replace(SPACE, feasible=configs)
    proposals = make_proposals(
        Assignment(space=mixed, first=(), usefulness=lambda config: config.block_m, trials=18), name
    )
    proposed = []
    while (config := proposals.propose()) is not None:
        proposed.append(config)
        proposals.tell(config, 1.0 + config.block_m)
    assert sorted(map(configs.index, proposed)) == list(range(len(configs)))
    infeasible = [trial for trial in proposals.study.trials if trial.constraints["runs"] > 0]
    assert all(trial.state == TrialState.PRUNED for trial in infeasible)
    assert not infeasible or name not in ("guided", "coordinate")


def test_a_study_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole = make_proposals(assignment())
    parted = make_proposals(assignment(), study=kept(tmp_path / "search.db"))
    order = []
    for number in range(12):
        if number == 6:
            parted.propose()
            parted.close()  # it ends with a config that was compiled and never tried
            parted = make_proposals(assignment(), study=kept(tmp_path / "search.db"))
        config = parted.propose()
        assert config == whole.propose()
        assert config is not None
        order.append(config)
        for proposals in (whole, parted):
            proposals.tell(config, landscape.time_us(config, 0), measured(config, landscape.time_us(config, 0)))
    assert len(set(order)) == 12
    states = [trial.state for trial in parted.study.trials]
    assert (states.count(TrialState.COMPLETE), states.count(TrialState.FAIL)) == (12, 1)


def test_what_a_killed_process_left_running_is_given_up(tmp_path: Path) -> None:
    killed = make_proposals(assignment(), study=kept(tmp_path / "search.db"))
    proposed = [killed.propose() for _ in range(3)]
    again = make_proposals(assignment(), study=kept(tmp_path / "search.db"))
    assert [again.propose() for _ in range(3)] == proposed


@pytest.mark.parametrize("name", ["guided", "tpe_from_model"])
def test_stored_trials_are_in_the_study_once(name: str) -> None:
    runner = ReplayRunner(landscape.measurements(0))
    first = new_search(runner, trials=25)
    first.run()
    known = list(first.trials.values())
    second = new_search(ReplayRunner(landscape.measurements(0)), trials=30, strategy=name, known=known)
    second.run()
    study = second._proposals.study  # type: ignore[attr-defined]
    labels = [trial.user_attrs["config"] for trial in study.trials if "config" in trial.user_attrs]
    assert sorted(labels) == sorted(config.label for config in second.trials)
    for trial in known:
        second._proposals.recall(trial.config, trial.relative_to_anchor, trial)
    assert len(study.trials) >= len(labels) == 30


def test_what_is_enqueued_in_the_study_is_tried() -> None:
    proposals = make_proposals(assignment())
    wish = CONFIGS[17]
    proposals.study.enqueue_trial({"kernel": wish.kernel, **wish.parameters})
    assert wish in [proposals.propose() for _ in range(2)]


def test_a_study_is_kept_in_a_database_of_its_own(tmp_path: Path) -> None:
    import sqlite3

    place = tmp_path / "store.db"
    with sqlite3.connect(place) as connection:
        connection.execute("create table winners (id integer)")
    connection.close()
    with pytest.raises(StoreError, match="other tables: winners"):
        kept(place)
    with pytest.raises(StoreError, match="Optuna cannot keep a study in"):
        kept(tmp_path / "no" / "folder.db")
    with pytest.raises(StoreError, match=r"Optuna cannot keep a study in nonsense://you:\*\*\*@here: "):
        open_study("a", "nonsense://you:secret@here")
    with pytest.raises(StoreError, match=r"Optuna cannot keep a study in .* invalid literal"):
        require_own("postgresql://you:secret@here:54x32/name")
