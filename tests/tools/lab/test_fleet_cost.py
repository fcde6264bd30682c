"""What a fleet costs: the simulation, and that the page shows it."""

from pathlib import Path

import pytest

from blocktune.tuner.lab.sweep_file import load_sweep
from tools.lab.fleet_cost import job_cost, makespan

ROOT = Path(__file__).parents[3]
SWEEPS = ROOT / "results" / "sweeps"

pytestmark = pytest.mark.triton_free


def test_whoever_is_idle_takes_the_longest_job() -> None:
    assert makespan([1, 1, 1, 1, 4], 2) == 4
    assert makespan([3, 3, 2, 2, 2], 2) == 7
    assert makespan([5], 4) == 5
    assert makespan([1] * 100, 1) == 100


def test_a_shape_whose_code_was_at_hand_says_nothing_of_compiling() -> None:
    assert job_cost(load_sweep(SWEEPS / "h200-b8-h16-s2048-d128-bf16.sweep.json.gz")) is None


def test_a_slow_compiler_makes_a_long_job() -> None:
    quick = job_cost(load_sweep(SWEEPS / "h200-b64-h32-8-s1-8192-d128-bf16.sweep.json.gz"))
    slow = job_cost(load_sweep(SWEEPS / "h200-b4-h8-s4096-d256-bf16-causal.sweep.json.gz"))
    assert quick is not None
    assert slow is not None
    assert 10 < quick.seconds < slow.seconds < 60
    assert 64 * 500 < quick.sent_bytes < 64 * 3000
