"""The table of a sweep: columns of equal length, predictions by today's models, cells that hold no measurement."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.limits import known_ccs, limits_for
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.cost.model import predict_us
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.occupancy.calculator import occupancy
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.report.device_table import ceilings, limits_table
from blocktune.tuner.report.empty_cells import empty_cells, place_of
from blocktune.tuner.report.on_chip_table import on_chip_table
from blocktune.tuner.report.sweep_table import sweep_table
from blocktune.tuner.report.trial_columns import TERMS, in_order, trial_columns

pytestmark = pytest.mark.triton_free

SWEEPS = Path(__file__).parents[3] / "results" / "sweeps"


@cache
def wide() -> Sweep:
    """A sweep with tiles that cannot exist, and configs that do not compile."""
    return load_sweep(SWEEPS / "h200-b4-h8-s4096-d256-bf16-causal.sweep.json.gz")


@cache
def columns() -> dict[str, list[Any]]:
    return trial_columns(wide(), in_order(wide().trials))


def test_columns_have_an_entry_for_every_trial() -> None:
    assert {len(column) for column in columns().values()} == {len(wide().trials)}


def test_predictions_are_those_of_the_model() -> None:
    trials = sorted(wide().trials, key=lambda trial: trial.created_at)
    for trial, total, blocks in zip(trials, columns()["total_us"], columns()["blocks_per_sm"], strict=True):
        if trial.resources is None:
            assert (total, blocks) == (None, None)
            continue
        kernel = get_kernel(trial.config.kernel)
        assert blocks == occupancy(trial.resources, wide().device.limits).blocks_per_sm
        predicted = predict_us(kernel, trial.config, wide().shape, wide().device, CompiledCode(trial.resources, None))
        assert total == pytest.approx(predicted, rel=1e-3)


def test_failed_trials_have_no_time_and_say_how_they_ended() -> None:
    failed = [index for index, time in enumerate(columns()["time_us"]) if time is None]
    assert failed
    for index in failed:
        assert columns()["outcome"][index] != "ok"
        assert columns()["score"][index] is None


def test_a_kernel_that_is_not_known_here_keeps_its_times_and_has_no_prediction() -> None:
    stranger = KernelConfig.of("of_elsewhere", {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2})
    first = next(trial for trial in wide().trials if trial.time_us)
    sweep = replace(wide(), trials=(replace(first, config=stranger),))
    table = sweep_table(sweep)
    assert table["columns"]["time_us"] == [first.time_us]
    assert {name: table["columns"][name] for name in TERMS} == {name: [None] for name in TERMS}
    assert (table["layouts"], table["empty_cells"], table["explanation"]) == ([], [], "")


def test_empty_cells_are_those_in_which_every_config_breaks_a_rule() -> None:
    cells = empty_cells(wide())
    tried = {place_of(trial.config) for trial in wide().trials}
    for cell in cells:
        assert cell.place not in tried
        kernel, m, n, warps, stages = cell.place
        sizes = {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": stages}
        own = get_kernel(kernel).default_config(wide().shape, wide().device.limits).parameters
        config = KernelConfig.of(kernel, own | sizes)
        assert get_kernel(kernel).violations(config, wide().shape, wide().device.limits)
        assert cell.reason
    assert len(cells) > 10


def test_layouts_are_listed_once_and_their_shared_tiles_are_what_the_compiler_allocates() -> None:
    trials = [trial for trial in wide().trials if trial.resources and trial.config.kernel == "flash_fwd_hopper"]
    layouts, numbers = on_chip_table(wide(), [trial.config for trial in trials])
    assert len(layouts) == len({str(layout) for layout in layouts})
    for trial, number in zip(trials, numbers, strict=True):
        assert number is not None
        assert trial.resources is not None
        shared = sum(tile["bytes"] for tile in layouts[number] if tile["place"] == "shared memory")
        assert 0 <= trial.resources.shared_bytes - shared < 2048  # barriers


def test_the_explanation_is_of_the_winner() -> None:
    assert sweep_table(wide())["explanation"].startswith("Predicted ")


def test_every_compute_capability_has_its_limits() -> None:
    table = limits_table()
    assert set(table) == {limits_for(cc).name for cc in known_ccs()}
    assert table["9.0"]["shared_per_sm_bytes"] == 228 * 1024


def test_ceilings_are_unknown_where_a_rate_is() -> None:
    h200 = device_named("h200")
    found = ceilings(h200, "bfloat16")
    assert found is not None
    assert (found["peak_tflops"], found["memory_gbs"]) == (h200.tensor_tflops, h200.memory_gbs)
    assert ceilings(replace(h200, memory_gbs=None), "bfloat16") is None
