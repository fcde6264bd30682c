"""Measured over predicted time of recorded sweeps, by kernel and family."""

from dataclasses import replace

import pytest

from blocktune.kernels.values.shape import AttentionShape, Causal, Direction
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.lab.untuned import family_of
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from tests.tuner.lab import test_replay as recorded
from tools.pages.searches.model_fit import FASTEST, FitRow, fit_rows
from tools.pages.searches.replay_tables import fit_table

pytestmark = pytest.mark.triton_free


def slower_than_predicted(factor: float, slowest: float) -> Sweep:
    """A sweep whose fastest configs took so many times the prediction, and all others another multiple."""
    plain = recorded.sweep()
    predicted = {
        trial.config: predict_us(
            recorded.KERNEL, trial.config, plain.shape, plain.device, CompiledCode(trial.resources, None)
        )
        for trial in plain.trials
        if trial.resources is not None
    }
    fast = set(sorted(predicted, key=lambda config: predicted[config])[:FASTEST])
    times = {config: (factor if config in fast else slowest) * time for config, time in predicted.items()}
    trials = tuple(
        replace(trial, time_us=times[trial.config], relative_to_anchor=times[trial.config])
        for trial in plain.trials
        if trial.config in times
    )
    return replace(plain, trials=trials)


def test_the_fastest_configs_of_a_kernel_count() -> None:
    (row,) = fit_rows([slower_than_predicted(1.5, 9.0)])
    assert (row.kernel, row.sweeps) == (recorded.KERNEL.name, 1)
    assert row.median == pytest.approx(1.5)
    assert (row.low, row.high) == pytest.approx((1.5, 1.5))


def test_sweeps_of_a_family_are_one_row() -> None:
    (row,) = fit_rows([slower_than_predicted(0.8, 9.0), slower_than_predicted(1.2, 9.0)])
    assert row.sweeps == 2
    assert (row.low, row.median, row.high) == pytest.approx((0.8, 1.0, 1.2))


def test_shapes_have_families() -> None:
    full = AttentionShape(
        batch=1, num_heads=8, num_heads_kv=8, seqlen_q=1024, seqlen_k=1024, head_dim=64, head_dim_v=64, dtype="bfloat16"
    )
    causal = replace(full, causal=Causal.UPPER_LEFT)
    assert family_of(full) == "forward, full"
    assert family_of(causal) == "forward, causal"
    assert family_of(replace(causal, direction=Direction.BACKWARD)) == "backward"
    assert family_of(replace(full, seqlen_q=1)) == "decoding"


def test_the_table_says_what_it_is_of() -> None:
    row = FitRow(family="decoding", kernel="flash_decode", sweeps=2, median=0.987, low=0.8, high=1.234)
    text = fit_table([row])
    assert "| decoding | `flash_decode` | 2 | 0.99 | 0.80 to 1.23 |" in text
    assert f"the {FASTEST} fastest configs" in text
    assert "as the replay recorded them, with the model of its day" in text
    assert fit_table([]) == ""
