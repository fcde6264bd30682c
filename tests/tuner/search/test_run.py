"""The use case with a real store: what it reports and keeps, how it resumes, and what it says when nothing works."""

import dataclasses
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blocktune.db import recorder
from blocktune.db.records.records import Outcome, Regime
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NoFeasibleConfigError, StoreError, UnknownDeviceError, UsageError
from blocktune.kernels.values.shape import AttentionShape
from blocktune.runtime.selection.expectation import Expectation
from blocktune.runtime.store_reader.tuned_config import TunedConfig
from blocktune.tuner.measure.measurement import REPEATED, Finals, Measurement
from blocktune.tuner.search.report import (
    MEASURED_BUDGET,
    PREDICTED_BUDGET,
    Budget,
    Progress,
    effective_budget,
)
from blocktune.tuner.search.tune import tune
from tests.support.models import landscape
from tests.support.models.landscape_runs import DEFAULT, SMALL, Replay, run

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("landscape_kernels")]


def test_the_winner_is_stored_with_its_evidence(store: ResultStore) -> None:
    told: list[Progress] = []
    report = run(store, Replay(), on_progress=told.append)
    best = report.best
    assert report.stored
    assert best.origin is Origin.MEASURED
    assert best.default == DEFAULT
    assert best.speedup_over_default is not None
    assert best.speedup_low is not None
    assert 1 < best.speedup_low <= best.speedup_over_default
    assert best.default_time_us / best.time_us == pytest.approx(best.speedup_over_default, rel=0.01)
    assert best.paper is not None
    assert report.occupancy is not None
    assert report.occupancy.blocks_per_sm > 0
    assert sum(report.outcomes.values()) == best.trials == 60
    stored = store.best(landscape.DEVICE, landscape.SHAPE)
    assert stored is not None
    assert (stored.config, stored.time_us, stored.trials) == (best.config, best.time_us, 60)
    assert len(store.trials(landscape.DEVICE, landscape.SHAPE)) == 60
    assert {"search", "finals"} == {progress.phase for progress in told}


class Listed:
    """Decides for one config, then the default."""

    def __init__(self, config: KernelConfig) -> None:
        self._configs = (config, DEFAULT)

    def choices(self, shape: AttentionShape, near: Sequence[TunedConfig]) -> list[Expectation]:
        return [Expectation(config=one, time_us=100.0, ratio=1.0, spread=0.0, shapes=0) for one in self._configs]


def test_what_calls_get_untuned_is_the_anchor_and_takes_part_in_the_finals(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the search has found faster ones: otherwise tuning could make a call slower."""
    timed = {config: one.time_us for config, one in landscape.measurements(0).items() if one.time_us is not None}
    fit = [config for config in landscape.SPACE.feasible if config in timed and landscape.fits(config)]
    slow = max(fit, key=lambda config: timed[config])
    monkeypatch.setattr("blocktune.tuner.candidates.starting_configs.shipped_untuned", lambda device: Listed(slow))
    finalists: list[KernelConfig] = []

    class Seen(Replay):
        def finals(self, configs: Any) -> Finals:
            finalists.extend(configs)
            return super().finals(configs)

    runner = Seen()
    report = run(store, runner)
    assert runner.measured[0] == slow
    assert finalists[:2] == [slow, DEFAULT]
    assert report.best.time_us is not None
    assert report.best.time_us < timed[slow]
    assert report.best.default == DEFAULT


def test_what_confirms_the_default_and_the_winner_is_compiled_before_the_finals(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktune.tuner.search.run.default_workers", lambda: 16)
    compiler = landscape.InstantCompiler()

    class Seen(Replay):
        def finals(self, configs: Any) -> Finals:
            asked.extend(compiler.confirming)
            return super().finals(configs)

    asked: list[KernelConfig] = []
    report = run(store, Seen(), compiler=compiler)
    assert compiler.started
    assert {DEFAULT, report.best.config} <= set(asked)
    assert len(asked) == len(set(asked)) < len(compiler.submitted) / 2
    assert compiler.confirming == asked


def test_no_process_of_a_small_machine_leaves_the_search_for_confirmations(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktune.tuner.search.run.default_workers", lambda: 2)
    compiler = landscape.InstantCompiler()
    run(store, Replay(), compiler=compiler)
    assert compiler.confirming == []


def test_the_report_as_json_has_the_promised_names(store: ResultStore) -> None:
    data = run(store, Replay()).to_json()
    assert {"schema", "device", "shape", "best", "default", "outcomes", "seconds"} <= set(data)
    assert {"kernel", "config", "time_us", "origin"} <= set(data["best"])
    assert KernelConfig.from_json(data["best"]["config"]).kernel == data["best"]["kernel"]
    assert data["schema"] == 1
    assert data["outcomes"]["ok"] > 40
    assert sum(data["dropped"].values()) == len(landscape.SPACE.dropped)


@pytest.mark.parametrize(
    ("budget", "present", "exhaustive", "bounds"),
    [
        (Budget(), True, False, MEASURED_BUDGET),
        (Budget(), False, False, PREDICTED_BUDGET),
        (Budget(trials=500), False, False, Budget(trials=500)),
        (Budget(seconds=7.0), True, False, Budget(seconds=7.0)),
        (Budget(trials=500, seconds=7.0), True, True, Budget(seconds=7.0)),
        (Budget(), True, True, Budget()),
    ],
)
def test_a_bound_that_is_given_lifts_the_default_of_the_other(
    budget: Budget, present: bool, exhaustive: bool, bounds: Budget
) -> None:
    assert effective_budget(budget, present=present, exhaustive=exhaustive) == bounds


def test_the_report_names_the_bound_that_ended_the_search(store: ResultStore) -> None:
    assert run(store, Replay()).to_json()["ended_by"] == "trials"


def test_what_is_not_here_has_no_regime(store: ResultStore) -> None:
    with pytest.raises(UsageError, match="predictions have no regime"):
        run(store, None, device=device_named("h200"), regime=Regime.BURST)


def test_the_default_stays_unless_something_is_faster_beyond_the_noise(store: ResultStore) -> None:
    class Noisy(Replay):
        """All configs take the same time; the samples differ by noise."""

        def measure(self, config: KernelConfig) -> Measurement:
            honest = super().measure(config)
            if honest.outcome is not Outcome.OK:
                return honest
            jitter = landscape._noise(config, 5)
            self._recorded[config] = dataclasses.replace(
                honest,
                relative_to_anchor=1.0 - 0.01 * jitter,
                samples_us=tuple(1000 * (1 + 0.05 * (landscape._noise(config, index) - 0.5)) for index in range(40)),
            )
            return self._recorded[config]

    report = run(store, Noisy())
    assert report.best.config == DEFAULT
    assert report.best.speedup_over_default == 1.0
    assert "noise" in report.reason or "default is the fastest" in report.reason


def test_a_winner_that_fails_its_confirmation_leaves_the_place(store: ResultStore) -> None:
    class WrongLse(Replay):
        wrong: KernelConfig | None = None

        def confirm(self, config: KernelConfig) -> Measurement:
            self.wrong = self.wrong or config
            bad = Measurement(outcome=Outcome.WRONG_RESULT, error="error of the log-sum-exp")
            return bad if config == self.wrong else super().confirm(config)

    runner = WrongLse()
    report = run(store, runner)
    assert runner.wrong is not None
    assert report.best.config != runner.wrong
    failed = next(trial for trial in store.trials() if trial.config == runner.wrong)
    assert failed.outcome is Outcome.WRONG_RESULT
    assert report.outcomes[Outcome.WRONG_RESULT] > 0


def test_a_restricted_search_is_still_measured_against_the_default(store: ResultStore) -> None:
    report = run(store, Replay(), kernels=[landscape.KERNELS["descriptors"]])
    assert report.best.default == DEFAULT
    assert report.best.config.kernel == "descriptors"
    assert {trial.config.kernel for trial in store.trials()} == {"pointers", "descriptors"}
    wider = run(store, Replay(), budget=Budget(trials=100))
    assert wider.best.time_us <= report.best.time_us * 1.01


def test_a_disturbed_run_says_so_and_keeps_the_marks(store: ResultStore) -> None:
    class Disturbed(Replay):
        def measure(self, config: KernelConfig) -> Measurement:
            honest = super().measure(config)
            if honest.outcome is not Outcome.OK or len(self.measured) % 2:
                return honest
            return dataclasses.replace(honest, error=f"{REPEATED}another process was on the GPU")

        def finals(self, configs: Any) -> Finals:
            return dataclasses.replace(super().finals(configs), disturbance=f"{REPEATED}the GPU slowed itself down")

    report = run(store, Disturbed(), budget=Budget(trials=20))
    marked = sum(trial.error.startswith(REPEATED) for trial in store.trials())
    assert marked > 5
    assert any(f"{marked} of" in note and "measured twice" in note for note in report.notes)
    assert "the finals were measured twice, since the GPU slowed itself down" in report.notes


def test_when_nothing_works_it_says_what_happened(store: ResultStore) -> None:
    class Broken(Replay):
        def measure(self, config: KernelConfig) -> Measurement:
            return Measurement(outcome=Outcome.RUN_ERROR, error="an illegal memory access was encountered")

    with pytest.raises(NoFeasibleConfigError, match=r"run_error.*illegal memory access"):
        run(store, Broken(), budget=Budget(trials=12))
    assert store.best(landscape.DEVICE, landscape.SHAPE) is None


def test_a_device_may_be_named(store: ResultStore) -> None:
    assert run(store, Replay(), device="h200").best.device.key == landscape.DEVICE.key
    with pytest.raises(UnknownDeviceError):
        run(store, Replay(), device="h2000")


def test_a_shape_that_no_kernel_takes(store: ResultStore) -> None:
    shape = dataclasses.replace(landscape.SHAPE, head_dim=512, num_heads=4, num_heads_kv=4)
    with pytest.raises(NoFeasibleConfigError, match="head dimensions up to 256"):
        tune(shape, device=landscape.DEVICE, store=store, runner=Replay())


def test_a_shape_too_large_for_the_memory(store: ResultStore) -> None:
    shape = dataclasses.replace(landscape.SHAPE, batch=4096)
    with pytest.raises(UsageError, match=r"needs about .* GiB .* and NVIDIA H200 has"):
        tune(shape, device=landscape.DEVICE, store=store, runner=Replay())


@pytest.mark.parametrize("values", [{"trials": 0}, {"trials": -3}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_a_budget_is_positive(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must hold"):
        Budget(**values)


def test_without_a_gpu_the_model_ranks_and_never_outranks_a_measurement(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktune.tuner.measure.environment._cuda_of_torch", lambda: "13.0")  # as where one measures
    absent = device_named("h200")
    predicted = run(store, None, device=absent)
    assert predicted.best.origin is Origin.PREDICTED
    assert predicted.best.time_us is None
    assert predicted.best.predicted_us is not None
    assert predicted.stored
    assert predicted.outcomes[Outcome.PREDICTED] > 40
    compiler = landscape.InstantCompiler()
    again = run(store, None, device=absent, compiler=compiler)
    assert compiler.submitted == []
    assert again.best.config == predicted.best.config
    measured = run(store, Replay())
    assert measured.resumed == 0
    assert measured.stored
    refused = run(store, None, device=absent, budget=Budget(trials=70))
    assert not refused.stored
    stored = store.best(absent, landscape.SHAPE)
    assert stored is not None
    assert stored.origin is Origin.MEASURED


def test_neighbours_are_tried_first(store: ResultStore) -> None:
    best = run(store, Replay()).best
    near = dataclasses.replace(landscape.SHAPE, seqlen_q=4096, seqlen_k=4096)

    class AnyShape(landscape.InstantCompiler):
        def submit(self, kernel: str, config: KernelConfig, shape: Any, cc: tuple[int, int]) -> Any:
            del shape
            return super().submit(kernel, config, landscape.SHAPE, cc)

    compiler = AnyShape()
    tune(near, device=landscape.DEVICE, store=store, budget=SMALL, compiler=compiler, runner=Replay())
    assert compiler.submitted[0] == DEFAULT
    assert best.config in compiler.submitted[:3]


@pytest.mark.parametrize("sampler", ["tpe", "optuna.samplers:RandomSampler"])
def test_any_sampler_finds_a_winner(store: ResultStore, sampler: str) -> None:
    runner = Replay()
    report = run(store, runner, sampler=sampler, budget=Budget(trials=25))
    assert len(runner.measured) == len(set(runner.measured)) <= 25
    assert runner.measured[0] == DEFAULT
    assert report.best.time_us is not None


def test_a_study_does_not_go_into_the_store(store: ResultStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="database of its own"):
        run(store, Replay(), study=store.label)
    assert store.trials() == []


def test_a_search_outlives_a_locked_store(store: ResultStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "IMPATIENT_SECONDS", 0.02)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        report = run(store.with_timeout(0.2), Replay())
        assert report.stored
        assert store.trials(landscape.DEVICE, landscape.SHAPE) == []
    recorder.fold_left(store)
    assert len(store.trials(landscape.DEVICE, landscape.SHAPE)) == 60
    assert store.best(landscape.DEVICE, landscape.SHAPE) == report.best
