"""Fitting the cost model's constants: it finds what made the times, keeps within bounds, and needs no unit."""

from dataclasses import replace

import pytest

from blocktune.tuner.cost.constants import CONSTANTS, CostConstants
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from tests.tuner.lab import test_replay as recorded
from tools.lab import calibration
from tools.lab.calibration import BOUNDS, calibrate, misfit

pytestmark = pytest.mark.triton_free

OTHER = CostConstants(block_start_cycles=9000.0, iteration_latency_cycles=120.0)


def made_by(constants: CostConstants, unit: float = 1.0) -> Sweep:
    """Every fourth config of one kernel, timed as these constants say, in some unit."""
    plain = recorded.sweep()
    trials = []
    for trial in plain.trials[::4]:
        assert trial.resources is not None
        time_us = unit * predict_us(
            recorded.KERNEL, trial.config, plain.shape, plain.device, CompiledCode(trial.resources, None), constants
        )
        trials.append(replace(trial, time_us=time_us, relative_to_anchor=time_us))
    return replace(plain, trials=tuple(trials))


def test_nothing_is_to_be_fitted_where_the_model_is_right() -> None:
    assert misfit([made_by(CONSTANTS, unit=7.0)]) == pytest.approx(0.0, abs=1e-9)
    assert calibrate([made_by(CONSTANTS)]) == CONSTANTS


def test_the_fit_comes_near_what_made_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name: BOUNDS[name] for name in ("block_start_cycles", "iteration_latency_cycles")}
    monkeypatch.setattr(calibration, "BOUNDS", wanted)
    told: list[float] = []
    sweep = made_by(OTHER, unit=3.0)
    found = calibrate([sweep], on_round=told.append)
    assert told == sorted(told, reverse=True)
    assert misfit([sweep], found) < 0.25 * misfit([sweep])
    assert found.iteration_latency_cycles == pytest.approx(OTHER.iteration_latency_cycles, rel=0.25)
    assert replace(found, **{name: getattr(CONSTANTS, name) for name in wanted}) == CONSTANTS


def test_bounds_hold_and_the_constants_lie_within() -> None:
    for name, (low, high) in BOUNDS.items():
        assert low < getattr(CONSTANTS, name) < high
    for name, (low, high) in BOUNDS.items():
        for moved in calibration._move_constant(replace(CONSTANTS, **{name: high}), name, 5.0):
            assert low <= getattr(moved, name) <= high
