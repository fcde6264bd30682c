"""Finalists by their energy, and the study that compares them with the fastest on recorded shapes."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocktune.db.exchange.document import save_document
from blocktune.db.records.records import Objective, Outcome
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.tuner.lab.sweep_file import SUFFIX, Sweep, save_sweep
from blocktune.tuner.measure.measurement import Energies, Measurement
from blocktune.tuner.search.finals import ENERGY_ROUNDS, frugal_energies
from blocktune.tuner.search.report import Budget, TuningReport
from blocktune.tuner.search.verdict import speedup
from blocktune.tuner.upkeep.verify import verify
from tests.support.models import landscape
from tests.support.models.landscape_runs import DEFAULT, Metered, Replay, run
from tools.bench import energy_study
from tools.bench.energy_study import FASTEST, Row, Study, document_of, finalists_of, rows_of
from tools.pages.recorded import energy_tables

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("landscape_kernels")]


QUICK = Budget(trials=20)


def tuned(store: ResultStore, runner: Replay | None, **changes: Any) -> TuningReport:
    return run(store, runner, budget=QUICK, **changes)


def sweep() -> Sweep:
    """Return what a sweep of the landscape would hold."""
    measured = landscape.measurements(0)
    trials = tuple(
        landscape.SUBJECT.trial(config, **found.trial_values())
        for config, found in measured.items()
        if landscape.fits(config)
    )
    subject = landscape.SUBJECT
    return Sweep(device=subject.device, environment=subject.environment, shape=subject.shape, trials=trials)


def timed(count: int) -> list[KernelConfig]:
    return [config for config, found in landscape.measurements(0).items() if found.time_us is not None][:count]


def test_the_most_frugal_and_the_kept_meet_for_as_many_rounds_as_decide() -> None:
    runner, finalists = Metered(), timed(6)
    energies = frugal_energies(runner, finalists, [finalists[-1]], most=2)
    (first, once), (second, rounds) = runner.bursts
    assert (first, once, rounds) == (finalists, 1, ENERGY_ROUNDS)
    assert second[0] == finalists[-1]
    assert set(energies.bursts) == set(second)
    joules = {config: runner.energies([config], 1).energy_mj(config) for config in finalists}
    assert set(sorted(finalists, key=lambda config: joules[config] or 0.0)[:2]) <= set(second)
    samples = [burst.energy_mj for burst in energies.bursts[second[0]]]
    assert speedup([2 * energy for energy in samples], samples).beyond_noise, "as many rounds as an interval needs"


def test_without_a_counter_nothing_bursts_twice() -> None:
    assert frugal_energies(Replay(), timed(3), []) == Energies()


def test_finals_by_energy_take_who_draws_less_and_keep_what_was_measured(store: ResultStore) -> None:
    fast = tuned(store, Metered()).best
    greedy = fast.config.num_warps
    report = tuned(store, Metered(greedy=greedy), objective=Objective.ENERGY)
    best = report.best
    assert (fast.objective, best.objective, report.stored) == ("time", "energy", True)
    assert best.config.num_warps != greedy
    assert best.time_us is not None
    assert fast.time_us is not None
    assert best.time_us > fast.time_us
    assert best.energy_mj == pytest.approx(0.4 * best.time_us, rel=0.02)
    assert best.default_time_us is not None
    assert best.speedup_over_default == pytest.approx(best.default_time_us / best.time_us, rel=0.01), "of times"
    assert best.default_energy_mj is not None
    assert report.reason.startswith("more frugal than the default: ")
    assert store.best(landscape.DEVICE, landscape.SHAPE) == best
    measured = {trial.config: trial for trial in store.trials() if trial.energy_mj is not None}
    assert {fast.config, best.config, DEFAULT} <= measured.keys()
    assert len(measured) < len(store.trials()) / 2, "only who took part"
    assert measured[best.config].energy_mj == pytest.approx(best.energy_mj)
    assert measured[best.config].telemetry.power_w == pytest.approx(400.0, rel=0.02)


def test_a_winner_of_another_objective_is_no_end_of_a_run(store: ResultStore) -> None:
    tuned(store, Metered())
    assert tuned(store, Metered()).reason == "found by an earlier run"
    again = Metered()
    assert tuned(store, again, objective=Objective.ENERGY).best.objective == "energy"
    assert again.measured == [], "the trials are known, only finals are held"
    assert tuned(store, Metered(), objective=Objective.ENERGY).reason == "found by an earlier run"


def test_a_frugal_winner_that_is_wrong_leaves_its_place_to_the_next(store: ResultStore) -> None:
    class Wrong(Metered):
        refused: KernelConfig | None = None

        def confirm(self, config: KernelConfig) -> Measurement:
            if self.refused is None:
                self.refused = config
                return Measurement(outcome=Outcome.WRONG_RESULT, error="wrong")
            return super().confirm(config)

    runner = Wrong()
    best = tuned(store, runner, objective=Objective.ENERGY).best
    assert best.objective == "energy"
    assert best.config != runner.refused


def test_without_a_counter_the_objective_is_refused_and_time_goes_on(store: ResultStore) -> None:
    with pytest.raises(UsageError, match=r"reports its energy by NVML.*--objective time.*all trials are kept"):
        tuned(store, Replay(), objective=Objective.ENERGY)
    assert store.best(landscape.DEVICE, landscape.SHAPE) is None
    assert len(store.trials()) == QUICK.trials
    best = tuned(store, Replay()).best
    assert (best.objective, best.energy_mj, best.default_energy_mj) == ("time", None, None)
    with pytest.raises(UsageError, match="NVIDIA H200 does not"):
        tuned(store, None, device="h200", objective=Objective.ENERGY)


def test_verifying_keeps_the_objective(store: ResultStore) -> None:
    best = tuned(store, Metered(), objective=Objective.ENERGY).best
    verified = verify(
        best,
        device=landscape.DEVICE,
        environment=best.environment,
        store=store,
        compiler=landscape.InstantCompiler(),
        runner=Metered(),
    )
    assert verified.after is not None
    assert (verified.after.objective, verified.after.config) == ("energy", best.config)
    assert verified.after.energy_mj == pytest.approx(best.energy_mj)


def rows(runner: Replay, seconds: float = 60.0) -> list[Row]:
    study = Study(landscape.DEVICE, runner, lambda shape: None)
    end = time.monotonic() + seconds
    return list(rows_of([sweep()], study, landscape.InstantCompiler(), landscape.DEVICE, end))


def test_a_study_finds_the_config_that_draws_less(tmp_path: Path) -> None:
    default, finalists = finalists_of(sweep(), landscape.DEVICE)
    assert finalists[0] == default
    assert len(finalists) == FASTEST + 1
    (row,) = rows(Metered())
    assert row["fastest"]["config"]["num_warps"] == 2
    assert row["frugal"]["config"]["num_warps"] > 2
    assert row["differs"]
    assert row["saved"]["median"] == pytest.approx(row["fastest"]["energy_mj"] / row["frugal"]["energy_mj"], rel=0.02)
    assert row["fastest"]["time_us"] < row["frugal"]["time_us"]
    assert row["fastest"]["power_w"] == pytest.approx(700.0, rel=0.02)
    place = tmp_path / "h200.energy.json"
    save_document(document_of([row], landscape.DEVICE, landscape.SUBJECT.environment), place)
    assert json.loads(place.read_text())["format"] == energy_tables.FORMAT
    table = energy_tables.block(place)
    assert f"**{row['saved']['median']:.3f} (" in table
    assert "On 1 of 1 shapes a finalist takes less energy" in table


def test_the_same_winner_is_a_result_too(tmp_path: Path) -> None:
    class Equal(Metered):
        def energies(self, configs: Sequence[KernelConfig], rounds: int) -> Energies:
            found = super().energies(configs, rounds)
            least = min(found.bursts, key=lambda config: found.bursts[config][0].time_us)
            return Energies(bursts={least: found.bursts[least]})

    (row,) = rows(Equal())
    assert (row["differs"], row["frugal"]) == (False, row["fastest"])
    place = tmp_path / "h200.energy.json"
    save_document(document_of([row], landscape.DEVICE, landscape.SUBJECT.environment), place)
    assert "On none of 1 shapes" in energy_tables.block(place)
    assert "| the same |" in energy_tables.block(place)


def test_a_study_ends_in_time_and_leaves_out_what_has_no_energy(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(Metered(), seconds=-1.0) == []
    assert rows(Replay()) == []
    assert "must tell its energy" in capsys.readouterr().err
    study = Study(landscape.DEVICE, Replay(), lambda shape: None)
    with pytest.raises(BlocktuneError, match="none of 0 does"):
        study.row(sweep(), [], landscape.SPACE.feasible[0])


def test_the_program_writes_its_file_and_tells_every_shape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = save_sweep(sweep(), tmp_path)
    runner = Metered()
    runner.turn_to = lambda shape: None  # type: ignore[attr-defined]
    monkeypatch.setattr(energy_study, "SWEEPS", (recorded.name.removesuffix(SUFFIX),))
    monkeypatch.setattr(energy_study, "current_device", lambda: landscape.DEVICE)
    monkeypatch.setattr(energy_study, "GpuMonitor", lambda *_, **__: SimpleNamespace(energy_j=lambda: 1.0))
    monkeypatch.setattr(energy_study, "GpuRunner", lambda *_, **__: runner)
    monkeypatch.setattr(energy_study, "farm_for", lambda device: nullcontext(landscape.InstantCompiler()))
    monkeypatch.setattr(energy_study, "measuring_environment", lambda *_: landscape.SUBJECT.environment)
    place = tmp_path / "h200.energy.json"
    monkeypatch.setattr(sys, "argv", ["energy_study", "--out", str(place), "--sweeps", str(tmp_path)])
    energy_study.main()
    assert "1/1 b2 h32 s8192 d64 bf16: differs True" in capsys.readouterr().out
    assert "On 1 of 1 shapes" in energy_tables.block(place)
    assert f"NVIDIA H200 on {datetime.now(UTC):%Y-%m-%d} (" in energy_tables.block(place)
    monkeypatch.setattr(energy_study, "GpuMonitor", lambda *_, **__: SimpleNamespace(energy_j=lambda: None))
    with pytest.raises(UsageError, match="must tell its energy by NVML"):
        energy_study.main()


def test_a_study_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    place, environment = tmp_path / "h200.energy.json", landscape.SUBJECT.environment
    assert energy_study.rows_in(place, landscape.DEVICE, environment) == []
    found = rows(Metered())
    save_document(document_of(found, landscape.DEVICE, environment), place)
    assert energy_study.rows_in(place, landscape.DEVICE, environment) == found
    with pytest.raises(UsageError, match=r"must be a study of NVIDIA H200 .* something else"):
        energy_study.rows_in(place, landscape.DEVICE, replace(environment, driver="1.0"))


def test_without_a_file_the_page_says_how_it_comes_about(tmp_path: Path) -> None:
    assert "energy_study" in energy_tables.block(tmp_path / "h200.energy.json")
