"""Sweeps as traces: slices that follow each other, and counters next to them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.report.search_trace import search_trace

pytestmark = pytest.mark.triton_free

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return load_sweep(SWEEPS / "h200-b2-h32-s8192-d64-bf16.sweep.json.gz")


@pytest.fixture(scope="module")
def events(sweep: Sweep) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(search_trace([sweep, sweep]))["traceEvents"]
    return found


def test_every_trial_is_a_slice_of_its_kernel(sweep: Sweep, events: list[dict[str, Any]]) -> None:
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert sorted(each["name"] for each in slices) == sorted(trial.config.label for trial in sweep.trials)
    threads = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert all(each["name"].startswith(f"{threads[each['tid']]} ") for each in slices)
    assert min(each["ts"] for each in slices) == 0


def test_one_measurement_runs_at_a_time(events: list[dict[str, Any]]) -> None:
    slices = sorted((each for each in events if each["ph"] == "X" and each["pid"] == 1), key=lambda each: each["ts"])
    late = [one["ts"] + one["dur"] - other["ts"] for one, other in pairwise(slices)]
    assert max(late) <= 1000  # seconds are stored with three digits


def test_the_best_so_far_only_rises_to_the_fastest(sweep: Sweep, events: list[dict[str, Any]]) -> None:
    best = [each["args"]["value"] for each in events if each["name"] == "best, TFLOP/s" and each["pid"] == 2]
    assert best == sorted(best)
    fastest = min(trial.time_us or 0.0 for trial in sweep.timed.values())
    assert best[-1] == pytest.approx(sweep.shape.flops / fastest / 1e6)
    assert {"SM clock, MHz", "temperature, C"} <= {each["name"] for each in events if each["ph"] == "C"}
