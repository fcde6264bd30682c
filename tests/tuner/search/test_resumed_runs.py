"""Runs that go on where an earlier one ended, was interrupted or was killed."""

import dataclasses
import signal
import subprocess
import time
from pathlib import Path

import pytest

from blocktune.db import recorder
from blocktune.db.records.records import Outcome, Regime
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.search.report import Budget
from tests.support.models import landscape
from tests.support.models.landscape_runs import DEFAULT, SMALL, Replay, run
from tools import python

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("landscape_kernels")]


def test_a_finished_run_answers_from_the_store(store: ResultStore) -> None:
    first = run(store, Replay())
    runner, compiler = Replay(), landscape.InstantCompiler()
    second = run(store, runner, compiler=compiler)
    assert (runner.measured, runner.finals_held, compiler.submitted) == ([], 0, [])
    assert second.best.config == first.best.config
    assert second.outcomes == first.outcomes
    assert second.resumed == 60
    assert second.occupancy == first.occupancy


def test_a_larger_budget_goes_on_where_the_smaller_one_ended(store: ResultStore) -> None:
    run(store, Replay())
    made = {trial.config for trial in store.trials()}
    runner = Replay()
    report = run(store, runner, budget=Budget(trials=90))
    assert report.best.trials == 90
    assert runner.finals_held == 1
    assert not made & set(runner.measured)


def test_a_new_kernel_source_or_software_measures_again(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run(store, Replay(), budget=Budget(trials=20))
    monkeypatch.setattr(landscape.LandscapeKernel, "source_hash", property(lambda self: f"new {self.name}"))
    runner = Replay()
    report = run(store, runner, budget=Budget(trials=20))
    assert report.resumed == 0
    assert DEFAULT in runner.measured


def test_each_regime_has_trials_of_its_own_and_the_last_one_the_winner(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktune.tuner.measure.environment._cuda_of_torch", lambda: "13.0")  # as where one measures
    few = Budget(trials=12)
    hot = run(store, Replay(), budget=few, regime=Regime.SUSTAINED)
    cool = run(store, Replay(salt=3), budget=few, regime=Regime.BURST)
    assert cool.resumed == 0
    assert [len(store.trials(environment=report.best.environment)) for report in (hot, cool)] == [12, 12]
    assert store.bests() == [cool.best]
    assert cool.to_json()["environment"]["regime"] == "burst"
    runner = Replay()
    again = run(store, runner, budget=few)  # the default, of which all trials are known
    assert (again.resumed, runner.measured, runner.finals_held) == (12, [], 1)
    assert [best.environment.regime for best in store.bests()] == [Regime.SUSTAINED]


def test_a_run_cut_short_keeps_everything_and_resumes(store: ResultStore) -> None:
    report = run(store, Replay(interrupt_after=12))
    assert report.interrupted
    assert report.stored
    assert report.best.speedup_over_default is None
    assert report.outcomes[Outcome.OK] <= 12
    made = {trial.config for trial in store.trials()}
    runner = Replay()
    resumed = run(store, runner)
    assert not resumed.interrupted
    assert resumed.resumed == len(made)
    assert not made & set(runner.measured)
    assert resumed.best.speedup_over_default is not None
    again = run(store, Replay(interrupt_after=0), budget=Budget(trials=90))
    assert again.interrupted
    assert not again.stored  # a winner of finals is not replaced by one of a cut run


def test_an_interrupt_before_anything_was_found_is_an_interrupt(store: ResultStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(store, Replay(interrupt_after=0))


KILLED_RUN = """
import sys, time
from blocktune.db.store import ResultStore
from blocktune.kernels import registry
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.search.report import Budget
from blocktune.tuner.search.tune import tune
from tests.support.models import landscape

registry.KERNELS.clear()
registry.KERNELS.update(landscape.KERNELS)

class Slow(ReplayRunner):
    def measure(self, config):
        time.sleep(0.02)
        print(config.label, flush=True)
        return super().measure(config)

with ResultStore.open(sys.argv[1]) as store:
    tune(landscape.SHAPE, device=landscape.DEVICE, store=store, budget=Budget(trials=60),
         compiler=landscape.InstantCompiler(), runner=Slow(landscape.measurements(0)))
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("measured", [2, 17])
def test_a_killed_run_resumes_and_measures_nothing_again(tmp_path: Path, measured: int) -> None:
    path = tmp_path / "store.db"
    command = [*python(KILLED_RUN), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = [process.stdout.readline().strip() for _ in range(measured)]
        time.sleep(0.005 * measured)
        process.send_signal(signal.SIGKILL)
        begun += [line.strip() for line in process.stdout]
    with ResultStore.open(path) as store:
        recorder.fold_left(store)  # the kill may have come between the two
        kept = {trial.config.label for trial in store.trials()}
        assert set(begun[:-1]) <= kept  # all but the one in flight
        runner = Replay()
        report = run(store, runner)
    assert not kept & {config.label for config in runner.measured}
    assert report.resumed == len(kept)
    assert report.best.trials == 60


@pytest.mark.exhaustive
def test_an_exhaustive_run_measures_again_whom_a_race_had_stopped(store: ResultStore) -> None:
    class Raced(Replay):
        def measure(self, config: KernelConfig) -> Measurement:
            honest = super().measure(config)
            behind = (honest.relative_to_anchor or 0.0) > 1.0
            return dataclasses.replace(honest, samples_us=honest.samples_us[:2]) if behind else honest

    run(store, Raced(), budget=SMALL)
    stopped = {trial.config for trial in store.trials() if len(trial.samples_us) == 2}
    assert 5 < len(stopped) < 60
    runner = Replay()
    report = run(store, runner, exhaustive=True, budget=None)
    assert report.ended_by == ""
    assert report.resumed == 60 - len(stopped)
    assert stopped <= set(runner.measured)
    assert sum(report.outcomes.values()) == len(landscape.SPACE.feasible)


@pytest.mark.exhaustive
def test_a_study_is_kept_beside_the_store_and_goes_on_with_it(store: ResultStore, tmp_path: Path) -> None:
    import optuna

    place = tmp_path / "search.db"
    run(store, Replay(), study=str(place), budget=Budget(trials=30))
    report = run(store, Replay(), study=str(place), budget=Budget(trials=45))
    (name,) = optuna.get_all_study_names(f"sqlite:///{place}")
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{place}")
    labels = [trial.user_attrs["config"] for trial in study.trials if "config" in trial.user_attrs]
    assert sorted(labels) == sorted(trial.config.label for trial in store.trials())
    assert len(labels) == len(report.predicted_us) == 45
    assert study.user_attrs["shape"] == landscape.SHAPE.label
    fastest = min(store.trials(), key=lambda trial: trial.relative_to_anchor or 9.9)
    assert study.best_trial.user_attrs["config"] == fastest.config.label
