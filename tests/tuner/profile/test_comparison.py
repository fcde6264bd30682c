"""Predictions next to counters: those of an H200 in results/, and made ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.kernels.values.config import KernelConfig
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cost.analysis import Analysis, analyse
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.shared_accesses import SharedAccesses
from blocktune.tuner.profile.comparison import (
    CONFLICTS,
    DRAM_READ,
    DRAM_WRITTEN,
    ISSUE,
    L2_TO_SM,
    L2_WRITTEN,
    METRICS,
    OCCUPANCY,
    SECTOR_BYTES,
    SPECIAL,
    STALL_TERMS,
    TENSOR,
    Row,
    comparison,
    stalls_of,
)
from blocktune.tuner.profile.counter_file import CounterFile
from blocktune.tuner.profile.counters import TIME, Counters
from tests.support.models.counters import raw_page

pytestmark = pytest.mark.triton_free

SHIPPED = Path(__file__).parents[3] / "blocktune" / "results"
PREFILL = complete_shape(4096, 64, batch=2, heads=32)
RESOURCES = KernelResources(registers=168, shared_bytes=49_152, num_warps=4, tensor_cores="wgmma")
SHARED = SharedAccesses(loads=4, load_wavefronts=12, load_excess=8, stores=2, store_wavefronts=3, store_excess=1)


def analysis_of(name: str, shape: Any = PREFILL, **choices: int) -> Analysis:
    kernel, device = get_kernel(name), device_named("h200")
    config = KernelConfig.of(name, kernel.default_config(shape, device.limits).parameters | choices)
    warps = 4 + kernel.softmax_cost(config).copying_warps
    return analyse(kernel, config, shape, device, CompiledCode(replace(RESOURCES, num_warps=warps), SHARED))


def rows_of(analysis: Analysis, **values: float) -> dict[str, Row]:
    """The rows with these counters, by their names in this module; the others are not there."""
    metrics = {globals()[name]: ("", f"{value}") for name, value in values.items()}
    counters = Counters.parse(raw_page([("kernel", metrics)]))
    return {row.name: row for row in comparison(analysis, counters)}


# ---- counters that were recorded on an H200


@pytest.mark.parametrize("name", ["flash_fwd", "flash_fwd_tma", "flash_fwd_hopper"])
def test_what_was_counted_on_an_h200_is_next_to_its_predictions(name: str) -> None:
    file = CounterFile.read(SHIPPED / f"h200-{name}.counters.csv")
    assert file.analysis.config.kernel == name
    rows = {row.name: row for row in file.rows()}
    assert rows["L2 to multiprocessors"].ratio == pytest.approx(1.0, abs=0.01)
    assert rows["read from DRAM"].ratio == pytest.approx(1.0, abs=0.02)
    assert rows["occupancy"].ratio == pytest.approx(1.0, abs=0.05)
    for unit in ("tensor cores busy", "special functions busy"):
        assert rows[unit].ratio == pytest.approx(1.0, abs=0.1)
    written = rows["written to DRAM"]
    assert written.predicted is not None
    assert written.counted is not None
    assert written.counted < written.predicted  # L2 still holds the rest


# ---- what each row puts next to what


def test_units_are_compared_by_how_long_they_are_busy() -> None:
    analysis = analysis_of("flash_fwd")
    breakdown = analysis.breakdown
    assert breakdown is not None
    rows = rows_of(analysis, TIME=1000.0, TENSOR=40.0, SPECIAL=50.0, ISSUE=60.0)
    found = {name: (row.predicted, row.counted) for name, row in rows.items() if row.unit == "us"}
    assert found == {
        "time": (breakdown.total_us, 1000.0),
        "tensor cores busy": (breakdown.tensor_us, 400.0),
        "special functions busy": (breakdown.exp_us, 500.0),
        "schedulers issue": (breakdown.arithmetic_us, 600.0),
    }


def test_sectors_become_bytes() -> None:
    rows = rows_of(analysis_of("flash_fwd"), TIME=1.0, L2_WRITTEN=1000.0)
    assert rows["multiprocessors to L2"].counted == 1000 * SECTOR_BYTES
    assert rows["L2 to multiprocessors"].counted is None


def test_conflicts_are_those_of_every_warp_in_every_tile() -> None:
    rows = rows_of(analysis_of("flash_fwd", block_m=128, block_n=64), TIME=1.0, CONFLICTS=1.0)
    tiles = (4096 // 128) * (4096 // 64) * 2 * 32
    assert rows["bank conflicts"].predicted == (8 + 1) * 4 * tiles


def test_occupancy_is_less_where_the_grid_does_not_fill_the_gpu() -> None:
    full = rows_of(analysis_of("flash_fwd"), TIME=1.0, OCCUPANCY=12.0)["occupancy"]
    few = rows_of(analysis_of("flash_fwd", complete_shape(512, 64, batch=1, heads=2)), TIME=1.0)["occupancy"]
    assert full.predicted == pytest.approx(100 * 3 * 4 / 64)
    assert few.predicted is not None
    assert few.predicted < full.predicted
    assert (full.ratio, few.ratio) == (pytest.approx(18.75 / 12), None)


def test_stalls_are_shares_of_all_that_wait_with_the_term_they_speak_for() -> None:
    analysis = analysis_of("flash_fwd")
    ratios = {"selected": 1.0, "gmma": 3.0, "barrier": 1.0, "sleeping": 0.0, "tex_throttle": 0.5}
    metrics = {
        f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": value for name, value in ratios.items()
    }
    text = raw_page(
        [("kernel", {TIME: ("us", "1"), **{name: ("inst", str(value)) for name, value in metrics.items()}})]
    )
    found = stalls_of(analysis, Counters.parse(text))
    assert [(stall.reason, round(stall.share, 3), stall.term) for stall in found] == [
        ("gmma", 0.667, "tensor"),
        ("barrier", 0.222, "latency"),
        ("tex_throttle", 0.111, ""),
    ]
    assert analysis.breakdown is not None
    assert [stall.term_us for stall in found] == [analysis.breakdown.tensor_us, analysis.breakdown.latency_us, None]


def test_every_term_of_a_stall_is_one_of_the_model() -> None:
    breakdown = analysis_of("flash_fwd").breakdown
    assert all(hasattr(breakdown, f"{term}_us") for term in STALL_TERMS.values())


def test_everything_that_is_compared_is_asked_for() -> None:
    every = (TIME, TENSOR, SPECIAL, ISSUE, L2_TO_SM, L2_WRITTEN, DRAM_READ, DRAM_WRITTEN, CONFLICTS, OCCUPANCY)
    assert set(METRICS) == set(every)
    rows = rows_of(analysis_of("flash_fwd"), **{name: 1.0 for name, value in globals().items() if value in every})
    assert all(row.counted is not None and row.predicted is not None for row in rows.values())


def test_a_device_without_rates_has_bytes_but_no_times() -> None:
    analysis = replace(analysis_of("flash_fwd"), breakdown=None, shared=None)
    rows = rows_of(analysis, TIME=1.0, DRAM_READ=1.0)
    assert [row.name for row in rows.values() if row.predicted is None] == [
        "time", "tensor cores busy", "special functions busy", "schedulers issue", "bank conflicts",
    ]  # fmt: skip
