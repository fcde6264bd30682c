"""A stored winner, timed again: what is due, what is reported and what is stored."""

import dataclasses
import datetime
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Environment, Outcome, Regime
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.compile_server.farm import CompileFarm
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.search.report import Budget
from blocktune.tuner.search.tune import tune
from blocktune.tuner.upkeep.is_current import due_reason, speedup_reason
from blocktune.tuner.upkeep.verification import Verification
from blocktune.tuner.upkeep.verify import RUNNERS_UP, compile_ahead, verify
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

UPGRADED = Environment(triton="3.9.0", ptxas="13.1", torch="2.15")
DEFAULT = landscape.KERNELS["pointers"].default_config(landscape.SHAPE, landscape.DEVICE.limits)


@pytest.fixture(scope="module", autouse=True)
def _synthetic_kernels() -> Iterator[None]:
    with landscape.registered():
        yield


@pytest.fixture(scope="module")
def searched(_synthetic_kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a search on the landscape as it was."""
    path = tmp_path_factory.mktemp("searched") / "store.db"
    with ResultStore.open(path) as store:
        tune(
            landscape.SHAPE,
            device=landscape.DEVICE,
            store=store,
            budget=Budget(trials=24),
            compiler=landscape.InstantCompiler(),
            runner=ReplayRunner(landscape.measurements(0)),
        )
    return path


@pytest.fixture
def store(searched: Path, tmp_path: Path) -> Iterator[ResultStore]:
    """A copy of it, for one test to change."""
    with ResultStore.open(shutil.copyfile(searched, tmp_path / "store.db")) as store:
        yield store


@pytest.fixture
def winner(store: ResultStore) -> Best:
    best = store.best(landscape.DEVICE, landscape.SHAPE)
    assert best is not None
    return best


def verified(
    store: ResultStore, best: Best, runner: ReplayRunner, compiler: landscape.InstantCompiler | None = None
) -> Verification:
    return verify(
        best,
        device=landscape.DEVICE,
        environment=UPGRADED,
        store=store,
        compiler=compiler or landscape.InstantCompiler(),
        runner=runner,
    )


def changed(best: Best, **fields: object) -> dict[KernelConfig, Measurement]:
    """The landscape as it was, with the winner's measurement changed."""
    recorded = landscape.measurements(0)
    return recorded | {best.config: dataclasses.replace(recorded[best.config], **fields)}


def slower(measurement: Measurement, factor: float) -> dict[str, object]:
    assert measurement.time_us is not None
    assert measurement.relative_to_anchor is not None
    return {
        "time_us": measurement.time_us * factor,
        "relative_to_anchor": measurement.relative_to_anchor * factor,
        "samples_us": tuple(sample * factor for sample in measurement.samples_us),
    }


def test_a_winner_is_verified_under_its_own_regime(store: ResultStore, winner: Best) -> None:
    rested = dataclasses.replace(winner, environment=dataclasses.replace(winner.environment, regime=Regime.BURST))
    assert due_reason(rested, winner.environment) == ""
    found = verified(store, rested, ReplayRunner(landscape.measurements(0)))
    assert found.after is not None
    assert found.after.environment == dataclasses.replace(UPGRADED, regime=Regime.BURST)


def test_a_winner_that_still_wins_becomes_one_of_this_software(store: ResultStore, winner: Best) -> None:
    runner = ReplayRunner(landscape.measurements(0))
    found = verified(store, winner, runner)
    assert found.after is not None
    assert found.after.config == winner.config
    assert not found.wrong
    assert len(runner.measured) == len(found.rechecks) <= RUNNERS_UP + 3
    roles = [each.role for each in found.rechecks]
    assert (roles.count("winner"), roles.count("default"), roles.count("runner-up")) == (1, 1, RUNNERS_UP)
    assert all(each.ratio == pytest.approx(1.0, rel=0.01) for each in found.rechecks if each.role != "FA heuristic")
    stored = store.best(landscape.DEVICE, landscape.SHAPE)
    assert stored is not None
    assert (stored.environment, stored.origin) == (UPGRADED, Origin.MEASURED)
    assert stored.default == DEFAULT
    assert stored.speedup_over_default == found.after.speedup_over_default
    assert stored.trials == len(store.trials(environment=UPGRADED)) == len(found.rechecks)
    assert due_reason(stored, UPGRADED) == ""


def test_what_is_compiled_ahead_is_what_is_timed(store: ResultStore, winner: Best) -> None:
    compiles = compile_ahead(winner, device=landscape.DEVICE, store=store, compiler=landscape.InstantCompiler())
    found = verified(store, winner, ReplayRunner(landscape.measurements(0)))
    assert [compiled.result().config for compiled in compiles] == [each.config for each in found.rechecks]


def test_what_confirms_a_winner_is_compiled_ahead_by_a_farm(store: ResultStore, winner: Best) -> None:
    class Farm(CompileFarm):
        def __init__(self) -> None:
            self.confirmed: list[KernelConfig] = []

        def submit(self, *job: Any, **options: Any) -> Any:
            return landscape.InstantCompiler().submit(*job, **options)

        def submit_with_lse(self, kernel: str, config: KernelConfig, *_: Any) -> Any:
            self.confirmed.append(config)

    farm = Farm()
    compiles = compile_ahead(winner, device=landscape.DEVICE, store=store, compiler=farm)
    assert farm.confirmed == [compiled.result().config for compiled in compiles]


def test_nothing_is_compiled_for_a_shape_that_no_kernel_computes(store: ResultStore, winner: Best) -> None:
    wide = dataclasses.replace(winner, shape=dataclasses.replace(winner.shape, head_dim=4096, head_dim_v=4096))
    assert compile_ahead(wide, device=landscape.DEVICE, store=store, compiler=landscape.InstantCompiler()) == []
    with pytest.raises(NoFeasibleConfigError):
        verified(store, wide, ReplayRunner({}))


def test_a_winner_that_an_upgrade_slowed_loses_its_place(store: ResultStore, winner: Best) -> None:
    recorded = changed(winner, **slower(landscape.measurement(winner.config, 0), 1.5))
    found = verified(store, winner, ReplayRunner(recorded))
    assert found.after is not None
    assert found.after.config != winner.config
    then = next(each for each in found.rechecks if each.role == "winner")
    assert then.ratio == pytest.approx(1.5, rel=0.01)
    assert store.best(landscape.DEVICE, landscape.SHAPE) == found.after
    document = found.to_json()
    assert document["changed"]
    assert document["before"]["config"] == winner.config.to_json()
    assert {"config", "role", "before_us", "after_us", "ratio", "outcome"} <= set(document["rechecks"][0])


def test_a_winner_that_computes_wrong_results_is_told_and_replaced(store: ResultStore, winner: Best) -> None:
    bad = {"outcome": Outcome.WRONG_RESULT, "time_us": None, "relative_to_anchor": None, "samples_us": ()}
    found = verified(store, winner, ReplayRunner(changed(winner, **bad, error="relative error 1.0e-01")))
    assert found.wrong
    assert found.after is not None
    assert found.after.config != winner.config
    assert next(each for each in found.rechecks if each.role == "winner").problem == "relative error 1.0e-01"


def test_a_wrong_winner_without_a_successor_is_forgotten(store: ResultStore, winner: Best) -> None:
    wrong = Measurement(outcome=Outcome.WRONG_RESULT, error="relative error 1.0e-01")
    found = verified(store, winner, ReplayRunner(dict.fromkeys(landscape.SPACE.feasible, wrong)))
    assert found.wrong
    assert found.after is None
    assert store.best(landscape.DEVICE, landscape.SHAPE) is None


def test_a_winner_whose_log_sum_exp_is_wrong_is_forgotten_too(store: ResultStore, winner: Best) -> None:
    class WrongLse(ReplayRunner):
        def confirm(self, config: KernelConfig) -> Measurement:
            del config
            return Measurement(outcome=Outcome.WRONG_RESULT, error="error of the log-sum-exp")

    found = verified(store, winner, WrongLse(landscape.measurements(0)))
    assert found.wrong
    assert {each.problem for each in found.rechecks} == {"error of the log-sum-exp"}
    assert store.best(landscape.DEVICE, landscape.SHAPE) is None


FULL = Measurement(
    outcome=Outcome.RUN_ERROR, error="OutOfMemoryError: CUDA out of memory, which another process has.", transient=True
)


def test_a_winner_that_the_machine_keeps_from_running_stays(store: ResultStore, winner: Best) -> None:
    found = verified(store, winner, ReplayRunner(landscape.measurements(0) | {winner.config: FULL}))
    assert (found.after, found.verified, found.wrong) == (winner, False, False)
    assert found.reason == (
        "it failed by this machine, not by itself: OutOfMemoryError: CUDA out of memory, which another process has"
    )
    assert store.best(landscape.DEVICE, landscape.SHAPE) == winner
    measured_now = store.trials(environment=UPGRADED)
    assert winner.config not in {trial.config for trial in measured_now}
    assert len(measured_now) == len(found.rechecks) - 1


def test_a_winner_that_the_machine_fails_at_its_confirmation_stays(store: ResultStore, winner: Best) -> None:
    class FullAtLast(ReplayRunner):
        def confirm(self, config: KernelConfig) -> Measurement:
            return FULL if config == winner.config else super().confirm(config)

    found = verified(store, winner, FullAtLast(landscape.measurements(0)))
    assert (found.after, found.verified) == (winner, False)
    assert store.best(landscape.DEVICE, landscape.SHAPE) == winner


def test_a_winner_whose_compile_takes_too_long_stays(store: ResultStore, winner: Best) -> None:
    class Busy(landscape.InstantCompiler):
        def submit(self, *job: Any) -> Any:
            if job[1] != winner.config:
                return super().submit(*job)
            late = Future[CompileResult]()
            late.set_result(
                CompileResult(config=winner.config, outcome=Outcome.COMPILE_TIMEOUT, error="no answer in 60 s")
            )
            return late

    found = verified(store, winner, ReplayRunner(landscape.measurements(0)), Busy())
    assert (found.after, found.verified) == (winner, False)
    assert store.best(landscape.DEVICE, landscape.SHAPE) == winner


def test_a_winner_that_fails_by_itself_is_replaced(store: ResultStore, winner: Best) -> None:
    broken = Measurement(outcome=Outcome.RUN_ERROR, error="an illegal memory access was encountered")
    found = verified(store, winner, ReplayRunner(landscape.measurements(0) | {winner.config: broken}))
    assert found.after is not None
    assert found.after.config != winner.config
    assert (found.verified, store.best(landscape.DEVICE, landscape.SHAPE)) == (True, found.after)


def test_who_won_meanwhile_is_not_forgotten(store: ResultStore, winner: Best) -> None:
    newer = dataclasses.replace(winner, config=DEFAULT, created_at=winner.created_at + datetime.timedelta(hours=1))
    store.set_best(newer)
    store.remove_best(winner)
    assert store.best(landscape.DEVICE, landscape.SHAPE) == newer


def test_a_lost_gpu_forgets_nothing(store: ResultStore, winner: Best) -> None:
    lost = Measurement(outcome=Outcome.RUN_ERROR, error="unspecified launch failure")
    found = verified(store, winner, ReplayRunner(dict.fromkeys(landscape.SPACE.feasible, lost)))
    assert (found.after, found.verified, found.wrong) == (winner, False, False)
    assert found.reason == "nothing that was timed again runs here"
    assert store.best(landscape.DEVICE, landscape.SHAPE) == winner


def test_what_came_from_elsewhere_is_measured_here(store: ResultStore, winner: Best, tmp_path: Path) -> None:
    everything = Results(bests=(winner,), trials=tuple(store.trials()))
    with ResultStore.open(tmp_path / "other.db") as other:
        other.merge([everything])
        (stranger,) = other.bests()
        assert due_reason(stranger, stranger.environment) == "it came from elsewhere"
        found = verified(other, stranger, ReplayRunner(landscape.measurements(0)))
        assert found.after is not None
        (now,) = other.bests()
    assert now.origin is Origin.MEASURED
    assert [each.role for each in found.rechecks].count("runner-up") == RUNNERS_UP


def test_a_config_that_cannot_run_any_more_is_said_to(store: ResultStore, winner: Best) -> None:
    gone = dataclasses.replace(winner, config=KernelConfig("forgotten", 64, 64, 4, 2))
    found = verified(store, gone, ReplayRunner(landscape.measurements(0)))
    then = next(each for each in found.rechecks if each.role == "winner")
    assert (then.outcome, then.problem) == (Outcome.INFEASIBLE, "there is no kernel forgotten any more")
    assert found.after is not None
    assert found.after.config.kernel in landscape.KERNELS


def test_only_what_changed_is_due(winner: Best) -> None:
    here = winner.environment
    assert due_reason(winner, here) == ""
    assert due_reason(dataclasses.replace(winner, origin=Origin.PREDICTED), UPGRADED) == ""
    assert "source of" in due_reason(dataclasses.replace(winner, kernel_hash="f" * 16), here)
    newer = dataclasses.replace(here, triton="99.0", driver="580.65.06")
    assert due_reason(winner, newer) == f"triton {here.triton} became 99.0, driver unknown became 580.65.06"


def test_a_winner_that_was_not_timed_against_todays_default_is_due(winner: Best) -> None:
    assert winner.default == DEFAULT != winner.config
    assert speedup_reason(winner) == ""
    stale = dataclasses.replace(winner, default=dataclasses.replace(DEFAULT, num_stages=7))
    why = f"it was not timed against {DEFAULT.label}, the default"
    assert due_reason(stale, winner.environment) == speedup_reason(stale) == why
    unknown = dataclasses.replace(winner, speedup_over_default=None, speedup_low=None, speedup_high=None)
    assert speedup_reason(unknown) == why
    assert speedup_reason(dataclasses.replace(stale, config=DEFAULT)) == "", "it is compared with itself"
    assert speedup_reason(dataclasses.replace(stale, origin=Origin.PREDICTED)) == ""
    assert speedup_reason(dataclasses.replace(unknown, default=None)) == "", "a frozen file names none"
