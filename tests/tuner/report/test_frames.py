"""Sweeps and databases as data frames."""

import sys
from pathlib import Path

import pytest

import blocktune
from blocktune.db.exchange.document import document_from
from blocktune.db.store import ResultStore
from blocktune.kernels.values.config import KernelConfig
from blocktune.kernels.values.errors import ImportRejectedError, UsageError
from blocktune.tuner.lab import sweep_file

pytestmark = pytest.mark.triton_free

SWEEP = (
    Path(__file__).parents[3] / "results" / "sweeps" / "h200-b4-h16-s4096-d128-bf16-causal-window-1023-1.sweep.json.gz"
)


@pytest.fixture
def pandas() -> None:
    pytest.importorskip("pandas", reason="data frames need pandas")


@pytest.mark.usefixtures("pandas")
def test_a_sweep_is_a_row_for_every_trial() -> None:
    frame, sweep = blocktune.load_sweep(SWEEP), sweep_file.load_sweep(SWEEP)
    assert frame["time_us"].tolist() == [trial.time_us for trial in sweep.trials]
    assert frame["created_at"].tolist() == [trial.created_at for trial in sweep.trials]


@pytest.mark.usefixtures("pandas")
def test_a_database_is_a_row_for_every_trial(tmp_path: Path) -> None:
    sweep = sweep_file.load_sweep(SWEEP)
    with ResultStore.open(tmp_path / "a.db") as store:
        store.import_json(document_from(sweep.device, (), sweep.trials))
    frame = blocktune.load_trials(tmp_path / "a.db")
    assert sorted(frame["time_us"]) == sorted(trial.time_us or 0 for trial in sweep.trials)


@pytest.mark.usefixtures("pandas")
def test_an_empty_database_is_an_empty_frame(tmp_path: Path) -> None:
    ResultStore.open(tmp_path / "a.db").close()
    assert len(blocktune.load_trials(tmp_path / "a.db")) == 0


def test_polars_gives_the_same_table() -> None:
    pytest.importorskip("polars", reason="data frames of polars need polars")
    pytest.importorskip("pandas", reason="data frames need pandas")
    frame, other = blocktune.load_sweep(SWEEP, library="polars"), blocktune.load_sweep(SWEEP)
    assert frame.columns == list(other.columns)
    for name in ("kernel", "time_us", "created_at", "outcome", "resources_registers"):
        assert frame[name].to_list() == other[name].tolist()
    best = frame.sort("time_us").row(0, named=True)
    assert best["samples_us"] == list(sweep_file.load_sweep(SWEEP).timed[min_config()].samples_us)


def min_config() -> KernelConfig:
    timed = sweep_file.load_sweep(SWEEP).timed
    return min(timed, key=lambda config: timed[config].time_us or 0.0)


def test_another_library_is_refused() -> None:
    with pytest.raises(UsageError, match="`library` must be pandas or polars, but got 'dask'"):
        blocktune.load_sweep(SWEEP, library="dask")


def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sweep.json.gz").write_text("no")
    with pytest.raises(ImportRejectedError, match="is not JSON in gzip"):
        blocktune.load_sweep(tmp_path / "a.sweep.json.gz")


def test_without_pandas_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="blocktune\\[frames\\]"):
        blocktune.load_sweep(SWEEP)
