"""The search on synthetic landscapes: it finds the best within its budget, repeats nothing, and keeps every trial."""

import dataclasses
import types
from concurrent.futures import Future
from typing import Any

import pytest

from blocktune.db.records.records import Outcome, Trial
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.tuner.candidates.assignment import Assignment
from blocktune.tuner.compile.compiler import CompileResult
from blocktune.tuner.lab.replay import ReplayRunner
from blocktune.tuner.measure.measurement import Measurement
from blocktune.tuner.sampling.study_storage import open_study
from blocktune.tuner.search.finals import require_result
from blocktune.tuner.search.loop import Search
from blocktune.tuner.search.report import Limit, Progress
from blocktune.tuner.search.strategies import DEFAULT as BY_DEFAULT
from blocktune.tuner.search.strategies import make_proposals
from blocktune.tuner.search.studies import tpe_proposals
from blocktune.tuner.subject.attention import AttentionSubject, ShapeCompiler
from tests.support.models import landscape

pytestmark = pytest.mark.triton_free

DEFAULT = landscape.KERNELS["pointers"].default_config(landscape.SHAPE, landscape.DEVICE.limits)


def useless(config: KernelConfig) -> float:
    """A model that knows nothing: a fixed, arbitrary order."""
    return landscape._noise(config, -3)


class Guessed(AttentionSubject):
    """The landscape with a model that only knows registers."""

    def predict(self, compiled: CompileResult[KernelConfig]) -> float:
        assert compiled.resources is not None
        return 1000.0 + compiled.resources.registers


FACTS = {field.name: getattr(landscape.SUBJECT, field.name) for field in dataclasses.fields(landscape.SUBJECT)}
SUBJECT = Guessed(**FACTS)


def new_search(
    runner: ReplayRunner | None, *, trials: int, seed: int = 0, strategy: str = BY_DEFAULT, **changes: Any
) -> Search:
    assignment = Assignment(space=landscape.SPACE, first=[DEFAULT], usefulness=useless, trials=trials, seed=seed)
    proposals = make_proposals(assignment, strategy)
    given: dict[str, Any] = {
        "runner": runner,
        "known": (),
        "record": lambda trial: None,
        "limit": Limit(trials=trials, seconds=1e9),
        "lookahead": 8,
        "on_progress": lambda progress: None,
    }
    farm = changes.pop("compiler", None) or landscape.InstantCompiler()
    compiler = ShapeCompiler(farm, landscape.SHAPE, landscape.DEVICE.limits.cc)
    return Search(SUBJECT, changes.pop("proposals", proposals), compiler, **given | changes)


@pytest.mark.parametrize("strategy", ["guided", "tpe_from_model"])
@pytest.mark.parametrize("salt", [0, 1, *(pytest.param(salt, marks=pytest.mark.exhaustive) for salt in range(2, 6))])
def test_it_finds_the_best_within_two_percent_in_a_fifth_of_the_space(salt: int, strategy: str) -> None:
    """Even though the model is useless here."""
    runner = ReplayRunner(landscape.measurements(salt))
    budget = len(landscape.SPACE.feasible) // 5
    search = new_search(runner, trials=budget, seed=salt, strategy=strategy)
    search.run()
    found_us = min(trial.time_us or 1e9 for trial in search.trials.values())
    assert landscape.best_time_us(salt) / found_us >= 0.98
    assert len(search.trials) == budget
    assert len(runner.measured) == len(set(runner.measured))
    assert runner.measured[0] == DEFAULT


def test_a_space_within_the_budget_is_enumerated() -> None:
    runner = ReplayRunner(landscape.measurements(0))
    search = new_search(runner, trials=10_000)
    search.run()
    assert set(search.trials) == set(landscape.SPACE.feasible)
    outcomes = {trial.outcome for trial in search.trials.values()}
    assert outcomes == {Outcome.OK, Outcome.COMPILE_ERROR, Outcome.WRONG_RESULT, Outcome.INFEASIBLE}
    infeasible = next(trial for trial in search.trials.values() if trial.outcome is Outcome.INFEASIBLE)
    assert infeasible.blocks_per_sm == 0
    assert infeasible.error == "not one block fits an SM: shared_memory"


def test_what_cannot_run_is_told_to_the_sampler_as_pruned() -> None:
    from optuna.trial import TrialState

    search = new_search(ReplayRunner(landscape.measurements(0)), trials=60, strategy="tpe")
    search.run()
    trials = search._proposals.study.trials  # type: ignore[attr-defined]
    states = [trial.state for trial in trials]
    ok = sum(trial.outcome is Outcome.OK for trial in search.trials.values())
    assert states.count(TrialState.COMPLETE) == ok
    assert states.count(TrialState.PRUNED) >= 60 - ok
    cannot_run = {trial.config.label for trial in search.trials.values() if trial.outcome is not Outcome.OK}
    told = [trial for trial in trials if trial.user_attrs.get("config") in cannot_run]
    assert len(told) == len(cannot_run) > 0
    assert all(trial.state == TrialState.PRUNED and trial.constraints["runs"] == 1.0 for trial in told)
    assert len(trials) - states.count(TrialState.FAIL) >= len(search.trials)


def test_the_sampler_never_repeats_itself_and_ends_with_the_space() -> None:
    small = dataclasses.replace(landscape.SPACE, feasible=landscape.SPACE.feasible[:30])
    proposals = tpe_proposals(open_study("small"), small, small.feasible, startup=10, seed=0)
    proposed = []
    while (config := proposals.propose()) is not None:
        proposed.append(config)
        proposals.tell(config, landscape.time_us(config, 0))
    assert sorted(proposed, key=small.feasible.index) == list(small.feasible)


def test_known_trials_are_not_made_again() -> None:
    first = new_search(ReplayRunner(landscape.measurements(0)), trials=40)
    first.run()
    known = list(first.trials.values())
    runner, compiler = ReplayRunner(landscape.measurements(0)), landscape.InstantCompiler()
    second = new_search(runner, trials=60, known=known, compiler=compiler)
    second.run()
    assert len(second.trials) == 60
    assert not set(first.trials) & (set(runner.measured) | set(compiler.submitted))


class FullDisk(landscape.InstantCompiler):
    """Compiles nothing, since Triton cannot write its cache."""

    def submit(self, *asked: Any) -> "Future[CompileResult]":
        config, future = asked[1], Future[CompileResult]()
        error = "OSError: [Errno 28] No space left on device"
        future.set_result(CompileResult(config=config, outcome=Outcome.COMPILE_ERROR, error=error, transient=True))
        return future


def test_what_a_full_disk_stopped_is_not_stored_and_tried_again() -> None:
    stored: list[Trial] = []
    search = new_search(None, trials=4, compiler=FullDisk(), record=stored.append)
    search.run()
    assert [trial.outcome for trial in search.trials.values()] == [Outcome.COMPILE_ERROR] * 4
    assert stored == []
    with pytest.raises(
        NoFeasibleConfigError, match=r"4 of 4 failed by this machine.*No space left.*Make room on the disks"
    ):
        require_result(list(search.trials.values()), SUBJECT, search.stopped_by_machine)


def test_what_a_full_disk_stopped_at_a_launch_is_not_stored_either() -> None:
    """The second launch finds the disk full; what follows finds space again."""
    stored: list[Trial] = []

    class FullOnce(ReplayRunner):
        def measure(self, config: KernelConfig) -> Any:
            found = super().measure(config)
            if len(self.measured) != 2:
                return found
            return Measurement(outcome=Outcome.RUN_ERROR, error="OSError: [Errno 28]", transient=True)

    search = new_search(FullOnce(landscape.measurements(0)), trials=4, record=stored.append)
    search.run()
    (lost,) = [trial for trial in search.trials.values() if trial not in stored]
    assert lost.outcome is Outcome.RUN_ERROR
    assert len(search.trials) == 4


def test_every_trial_is_kept_before_the_next_begins() -> None:
    kept: list[Trial] = []

    class Watching(ReplayRunner):
        def measure(self, config: KernelConfig) -> Any:
            assert all(config in {trial.config for trial in kept} for config in self.measured)
            return super().measure(config)

    search = new_search(Watching(landscape.measurements(0)), trials=30, record=kept.append)
    search.run()
    assert {trial.config for trial in kept} == set(search.trials)
    measured = next(trial for trial in kept if trial.outcome is Outcome.OK)
    assert measured.resources == landscape.resources_of(measured.config)
    assert measured.blocks_per_sm
    assert measured.limiters
    assert measured.predicted_us
    assert measured.compile_seconds == 0.5
    assert measured.bench_seconds == 0.1


@pytest.mark.parametrize("paces", [(1.0,), (5.0, 0.1), (0.1, 0.1, 0.1, 9.0), (3.0, 0.5, 7.0, 0.2, 0.2)], ids=str)
def test_the_time_left_never_counts_up(paces: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("blocktune.tuner.search.loop.time", types.SimpleNamespace(monotonic=lambda: now[0]))

    class Timed(ReplayRunner):
        def measure(self, config: KernelConfig) -> Any:
            now[0] += paces[len(self.measured) % len(paces)]
            return super().measure(config)

    told: list[Progress] = []
    search = new_search(Timed(landscape.measurements(0)), trials=60, on_progress=told.append)
    search.run()
    left = [progress.eta_seconds for progress in told]
    known = [seconds for seconds in left if seconds is not None]
    assert left[0] is None, "the first trial tells no pace"
    assert len(known) > 1
    assert known == sorted(known, reverse=True)
    assert min(known) >= 0


def test_what_is_measured_is_said_before_it_can_do_harm() -> None:
    told: list[Progress] = []

    class Harmful(ReplayRunner):
        def measure(self, config: KernelConfig) -> Any:
            assert told[-1].measuring == config
            return super().measure(config)

    runner = Harmful(landscape.measurements(0))
    new_search(runner, trials=12, on_progress=told.append).run()
    assert len(runner.measured) > 5
    assert told[-1].measuring is None


def test_a_time_budget_bounds_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("blocktune.tuner.search.loop.time", types.SimpleNamespace(monotonic=lambda: now[0]))

    class Timed(ReplayRunner):
        def measure(self, config: KernelConfig) -> Any:
            now[0] += 1.0
            return super().measure(config)

    told: list[Progress] = []
    limit = Limit(trials=1000, seconds=20.0)
    search = new_search(Timed(landscape.measurements(0)), trials=1000, limit=limit, on_progress=told.append)
    search.run()
    assert search.ended_by == "seconds"
    assert max(progress.eta_seconds or 0.0 for progress in told) <= 20.0


@pytest.mark.parametrize(("trials", "ended_by"), [(30, "trials"), (10_000, "")])
def test_a_search_tells_which_bound_ended_it(trials: int, ended_by: str) -> None:
    search = new_search(ReplayRunner(landscape.measurements(0)), trials=trials)
    search.run()
    assert search.ended_by == ended_by


def test_an_interrupt_loses_nothing() -> None:
    class Impatient(ReplayRunner):
        def measure(self, config: KernelConfig) -> Any:
            if len(self.measured) == 7:
                raise KeyboardInterrupt
            return super().measure(config)

    kept: list[Trial] = []
    search = new_search(Impatient(landscape.measurements(0)), trials=50, record=kept.append)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert sum(trial.bench_seconds > 0 for trial in kept) == 7
    assert set(search.trials) == {trial.config for trial in kept}


def test_the_time_is_a_bound_but_the_default_is_always_tried() -> None:
    runner = ReplayRunner(landscape.measurements(0))
    new_search(runner, trials=50, limit=Limit(trials=50, seconds=1e-9)).run()
    assert runner.measured == [DEFAULT]


def test_the_start_of_the_worker_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(ReplayRunner):
        """Starts for a minute, then takes a second for every config."""

        now = 0.0

        def measure(self, config: KernelConfig) -> Measurement:
            self.now += 1.0 if self.measured else 60.0
            return super().measure(config)

    runner = Timed(landscape.measurements(0))
    monkeypatch.setattr("blocktune.tuner.search.loop.time.monotonic", lambda: runner.now)
    new_search(runner, trials=50, limit=Limit(trials=50, seconds=4.5), strategy="enumeration").run()
    assert len(runner.measured) == 6  # one at 0 s, then those begun up to 4.5 s


def test_equal_machine_code_is_measured_once() -> None:
    class StageBlind(landscape.InstantCompiler):
        """Three and more stages compile to the same code, as where a loop has too few tiles."""

        def compiled(self, config: KernelConfig) -> CompileResult:
            same = dataclasses.replace(config, num_stages=min(3, config.num_stages))
            return dataclasses.replace(super().compiled(same), config=config)

    runner = ReplayRunner(landscape.measurements(0))
    search = new_search(runner, trials=10_000, compiler=StageBlind())
    search.run()
    copies = [trial for trial in search.trials.values() if "same machine code" in trial.error]
    assert copies
    for copy in copies:
        assert copy.config not in runner.measured
        assert any(copy.time_us == other.time_us for other in search.trials.values() if other is not copy)


def test_what_is_compiled_first_is_measured_while_the_rest_compiles() -> None:
    class Slow(landscape.InstantCompiler):
        """The default is ready at once; every other config only when something else was measured."""

        waiting: "list[tuple[Future[CompileResult], KernelConfig]]" = []  # noqa: RUF012

        def submit(self, kernel: str, config: KernelConfig, *rest: Any) -> "Future[CompileResult]":
            if config == DEFAULT:
                return super().submit(kernel, config, *rest)
            future: Future[CompileResult] = Future()
            self.waiting.append((future, config))
            return future

    compiler = Slow()

    class Releasing(ReplayRunner):
        def measure(self, config: KernelConfig) -> Any:
            for future, waiting in compiler.waiting:
                future.set_result(compiler.compiled(waiting))
            compiler.waiting.clear()
            return super().measure(config)

    told: list[Progress] = []
    search = new_search(Releasing(landscape.measurements(0)), trials=20, compiler=compiler, on_progress=told.append)
    search.run()
    assert len(search.trials) == 20
    assert told[-1].done == told[-1].total == 20
    assert told[-1].best is not None
    assert any(progress.eta_seconds is not None for progress in told)
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)


def test_without_a_runner_the_model_decides() -> None:
    search = new_search(None, trials=40)
    search.run()
    predicted = [trial for trial in search.trials.values() if trial.outcome is Outcome.PREDICTED]
    assert predicted
    assert all(trial.time_us is None and trial.predicted_us for trial in predicted)
