"""Trials as rows of plain values: nothing is lost, and text from elsewhere is shown as people may see it."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from blocktune.db.exchange.trial_table import csv_text, parquet_bytes, trial_rows
from blocktune.tuner.lab.sweep_file import load_sweep

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"
SWEEP = load_sweep(SWEEPS / "h200-b4-h8-s4096-d256-bf16-causal.sweep.json.gz")


def test_a_row_holds_what_the_trial_holds() -> None:
    rows = trial_rows(SWEEP.trials)
    for row, trial in zip(rows, SWEEP.trials, strict=True):
        assert (row["kernel"], row["block_m"], row["num_stages"]) == (
            trial.config.kernel,
            trial.config.block_m,
            trial.config.num_stages,
        )
        assert json.loads(row["parameters"]) == dict(trial.config.extra)
        assert (row["time_us"], row["samples_us"]) == (trial.time_us, list(trial.samples_us))
        assert row["resources_registers"] == (trial.resources and trial.resources.registers)
        assert (row["shape_head_dim"], row["shape"]) == (256, SWEEP.shape.label)
        assert (row["sm_clock_mhz"], row["regime"]) == (trial.telemetry.sm_clock_mhz, "sustained")


def test_every_row_has_the_same_columns() -> None:
    assert len({tuple(row) for row in trial_rows(SWEEP.trials)}) == 1


def test_csv_says_the_same() -> None:
    rows = trial_rows(SWEEP.trials)
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [row["time_us"] for row in read] == ["" if row["time_us"] is None else str(row["time_us"]) for row in rows]
    assert [json.loads(row["samples_us"]) for row in read] == [row["samples_us"] for row in rows]


def test_text_from_elsewhere_goes_through_the_door() -> None:
    hostile = replace(SWEEP.trials[0], error="\x1b[31mred", device=replace(SWEEP.device, name="a\x07b"))
    (row,) = trial_rows([hostile])
    assert (row["error"], row["device"]) == ("\\x1b[31mred", "a\\x07b")


def test_parquet_says_the_same() -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    rows = trial_rows(SWEEP.trials)
    assert parquet.read_table(io.BytesIO(parquet_bytes(rows))).to_pylist() == rows


@pytest.mark.parametrize(
    "text",
    [
        *('=HYPERLINK("http://x","y")', "+1+1", "-2+3", "@SUM(1)", "\t=1", "\n=1", "=cmd|' /C calc'!A0"),
        *(" =1+1", "\uff1d1+1", "\uff20SUM(1)", "-1-2", "+1e5+1"),
    ],
)
def test_no_cell_is_a_formula(text: str) -> None:
    """A spreadsheet would run what a stranger has written into a device's name or an error."""
    rows = [{"error": text, "time_us": -1.5}]
    (read,) = csv.DictReader(io.StringIO(csv_text(rows)))
    assert (read["error"], read["time_us"]) == (f"'{text}", "-1.5")


def test_a_cell_stays_in_its_row() -> None:
    """A carriage return ends a row for a spreadsheet, and the next cell may be a formula."""
    rows = [{"error": "a\r=1+1", "b": "x"}, {"error": "b\n=1+1", "b": "y"}]
    assert csv_text(rows) == 'error,b\na\\r=1+1,x\n"b\n=1+1",y\n'
