"""`tune export --format csv|parquet`: the trials of a database as a table."""

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.exchange.document import document_from
from blocktune.db.exchange.merging import Results
from blocktune.db.store import ResultStore
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"


SWEPT = "h200-b4-h16-s4096-d128-bf16-causal-window-1023-1.sweep.json.gz"


@pytest.fixture
def sweep(tune: Any) -> Sweep:
    """A sweep that the database of `tune` holds."""
    found = load_sweep(SWEEPS / SWEPT)
    with ResultStore.open(tune.db) as store:
        store.import_json(document_from(found.device, (), found.trials))
    return found


def test_csv_goes_to_a_file_and_to_stdout(tune: Any, sweep: Sweep, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    assert json.loads(tune("export", out, "--format", "csv", "--json").stdout) == {
        "schema": 1,
        "file": str(out),
        "trials": len(sweep.trials),
    }
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert sorted(float(row["time_us"]) for row in rows) == sorted(trial.time_us or 0.0 for trial in sweep.trials)
    assert tune("export", "-", "--format", "csv").stdout == out.read_text()


def test_parquet_goes_to_a_file(tune: Any, sweep: Sweep, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    out = tmp_path / "t.parquet"
    assert tune("export", out, "--format", "parquet").exit_code == 0
    assert parquet.read_table(out).num_rows == len(sweep.trials)
    refused = tune("export", "-", "--format", "parquet")
    assert refused.exit_code == 2
    assert "cannot be written to stdout" in refused.stderr


def test_what_cannot_be_written_is_said(tune: Any, winner: Any, tmp_path: Path) -> None:
    tune.store(winner())
    empty = tune("export", tmp_path / "t.csv", "--format", "csv")
    assert empty.exit_code == 6
    assert "The database has no trials" in empty.stderr


@pytest.mark.usefixtures("sweep")
def test_a_missing_folder_or_library_is_one_paragraph(
    tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tune("export", tmp_path / "no" / "t.csv", "--format", "csv")
    assert missing.exit_code == 2
    assert "cannot be written" in missing.stderr
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    without = tune("export", tmp_path / "t.parquet", "--format", "parquet")
    assert without.exit_code == 2
    assert 'pip install "blocktune[frames]"' in without.stderr


@pytest.mark.parametrize(("format_", "kind"), [("kernel-tuner", "cache"), ("t4", "t4")])
def test_files_of_kernel_tuner_go_to_a_folder_and_to_stdout(
    tune: Any, sweep: Sweep, tmp_path: Path, format_: str, kind: str
) -> None:
    files = json.loads(tune("export", tmp_path / "out", "--format", format_, "--json").stdout)["files"]
    kernels = sorted({trial.config.kernel for trial in sweep.trials})
    assert [Path(name).name.split(".")[1:] for name in files] == [[kernel, kind, "json"] for kernel in kernels]
    printed = json.loads(tune("export", "-", "--format", format_).stdout)
    assert printed == {Path(name).name: json.loads(Path(name).read_text()) for name in files}


def test_a_trace_is_one_file_or_stdout(tune: Any, sweep: Sweep, tmp_path: Path) -> None:
    assert tune("export", tmp_path / "trace.json", "--format", "trace").exit_code == 0
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written == json.loads(tune("export", "-", "--format", "trace").stdout)
    slices = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(sweep.trials)


@pytest.mark.parametrize("format_", ["kernel-tuner", "t4", "vllm"])
def test_a_device_of_any_name_has_files(tune: Any, winner: Any, tmp_path: Path, format_: str) -> None:
    trials = load_sweep(SWEEPS / SWEPT).trials
    device = replace(trials[0].device, name="H" * 256)
    with ResultStore.open(tune.db) as store:
        store.merge(
            [
                Results(
                    bests=(replace(winner(), device=device),),
                    trials=tuple(replace(trial, device=device) for trial in trials[:3]),
                )
            ],
            trust=True,
        )
    result = tune("export", tmp_path / "out", "--format", format_)
    assert result.exit_code == 0, result.stderr
    assert {len(file.name) < 256 for file in (tmp_path / "out").iterdir()} == {True}


def test_files_of_kernel_tuner_need_trials(tune: Any, winner: Any, tmp_path: Path) -> None:
    tune.store(winner())
    empty = tune("export", tmp_path / "out", "--format", "t4")
    assert empty.exit_code == 6
    assert "has no measured trials" in empty.stderr
