"""Finalists by their energy, and the study that compares them with the fastest on recorded shapes."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from blocktune.cli.pages.recorded import energy_tables
from blocktune.db.exchange.document import save_document
from blocktune.db.records.records import Trial
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import BlocktuneError, UsageError
from blocktune.tuner.lab.sweep_file import SUFFIX, Sweep, save_sweep
from blocktune.tuner.measure.measurement import Energies
from blocktune.tuner.search.energy_finals import ENERGY_ROUNDS, frugal_energies
from blocktune.tuner.search.verdict import speedup
from tests.support import landscape
from tests.support.landscape_runs import Metered, Replay
from tests.support.programs import energy_study
from tests.support.programs.energy_study import FASTEST, Row, Study, document_of, finalists_of, rows_of

pytestmark = [pytest.mark.triton_free, pytest.mark.usefixtures("landscape_kernels")]


def sweep() -> Sweep:
    """Return what a sweep of the landscape would hold."""
    measured = landscape.measurements(0)
    trials = tuple(
        landscape.SUBJECT.trial(config, **found.values_for(Trial))
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
    save_document(document_of([row], landscape.DEVICE, landscape.SUBJECT.environment, 12.0), place)
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
    save_document(document_of([row], landscape.DEVICE, landscape.SUBJECT.environment, 12.0), place)
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
    monkeypatch.setattr(energy_study, "GpuMonitor", lambda *_, **__: SimpleNamespace(energy_j=lambda: None))
    with pytest.raises(UsageError, match="must tell its energy by NVML"):
        energy_study.main()


def test_without_a_file_the_page_says_how_it_comes_about(tmp_path: Path) -> None:
    assert "energy_study" in energy_tables.block(tmp_path / "h200.energy.json")
