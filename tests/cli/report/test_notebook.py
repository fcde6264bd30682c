"""What notebooks show of an occupancy, an analysis and a sweep: a table, and the charts of the report as images."""

import base64
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from blocktune.db.records.records import Outcome
from blocktune.kernels.hardware.device import device_named
from blocktune.kernels.hardware.resources import KernelResources
from blocktune.kernels.registry import get_kernel
from blocktune.tuner.candidates.shape_defaults import complete_shape
from blocktune.tuner.cost.analysis import Analysis, analyse
from blocktune.tuner.lab.sweep_file import Sweep, load_sweep
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from blocktune.tuner.occupancy.of_block import occupancy
from tests.support.pages.reports import python_of_few_addresses

SWEEP = (
    Path(__file__).parents[3] / "results" / "sweeps" / "h200-b4-h16-s4096-d128-bf16-causal-window-1023-1.sweep.json.gz"
)
RESOURCES = KernelResources(registers=168, shared_bytes=40_000, num_warps=4, tensor_cores="wgmma")


def analysis(measured_us: float | None = None) -> Analysis:
    kernel, device, shape = get_kernel("flash_fwd"), device_named("h200"), complete_shape(4096, 64)
    config = kernel.default_config(shape, device.limits)
    return analyse(kernel, config, shape, device, CompiledCode(RESOURCES, None), measured_us=measured_us)


@pytest.fixture
def charts() -> None:
    pytest.importorskip("altair", reason="charts need altair")
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python")


def images(html: str) -> list[ElementTree.Element]:
    """The images of a page, as SVG documents."""
    found = ElementTree.fromstring(html).iter("img")
    codes = [image.attrib["src"].removeprefix("data:image/svg+xml;base64,") for image in found]
    return [ElementTree.fromstring(base64.b64decode(code)) for code in codes]


def texts(svg: ElementTree.Element) -> set[str]:
    return {"".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.usefixtures("charts")
def test_an_occupancy_has_a_curve_for_each_resource() -> None:
    found = images(occupancy(num_warps=4, registers=168, shared_bytes=40_000, cc="9.0")._repr_html_())
    titles = ("registers per thread", "shared memory of a block, KiB", "warps of a block")
    assert [title in texts(svg) for title, svg in zip(titles, found, strict=True)] == [True] * 3


@pytest.mark.usefixtures("charts")
def test_an_analysis_has_the_lanes_of_its_units() -> None:
    one = analysis()
    (svg,) = images(one._repr_html_())
    assert {"matrix products", "exponentials of the softmax", one.config.label} <= texts(svg)
    assert "registers spilled to local memory" not in texts(svg)  # nothing is spilled


@pytest.mark.usefixtures("charts")
def test_a_sweep_has_heat_maps_with_the_rate_of_its_best_tile() -> None:
    sweep = load_sweep(SWEEP)
    html = sweep._repr_html_()
    best = min(sweep.timed.values(), key=lambda trial: sweep.scores[trial.config])
    assert best.config.label in html
    first, *others = images(html)
    assert f"{sweep.shape.flops / (best.time_us or 1.0) / 1e6:.0f}" in texts(first)
    assert len(others) == min(2, len({trial.config.kernel for trial in sweep.trials}) - 1)
    assert "undefined" not in html


@pytest.mark.usefixtures("charts")
def test_configs_without_a_time_are_drawn_too() -> None:
    sweep = load_sweep(SWEEP)
    failed = tuple(replace(trial, outcome=Outcome.RUN_ERROR, time_us=None) for trial in sweep.trials)
    assert images(replace(sweep, trials=failed)._repr_html_())


def test_a_table_says_the_times_and_what_binds() -> None:
    predicted = analysis()
    total_us = predicted.breakdown.total_us if predicted.breakdown else 0.0
    cells = [row[1].text for row in ElementTree.fromstring(analysis(total_us)._repr_html_())[0].iter("tr")]
    assert cells[:3] == [predicted.config.label, f"{total_us:,.1f} µs", f"{total_us:,.1f} µs"]
    assert cells[-1] == "3 blocks/SM, limited by registers"
    far = analysis(10 * total_us)._repr_html_()
    assert "bound by" not in far  # the model does not explain it


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_without_the_libraries_there_are_tables_alone(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    sweep: Sweep = load_sweep(SWEEP)
    for value in (occupancy(num_warps=4, registers=168, shared_bytes=40_000, cc="9.0"), analysis(), sweep):
        page = ElementTree.fromstring(value._repr_html_())
        assert [element.tag for element in page] == ["table"]


@pytest.mark.usefixtures("charts")
def test_under_a_limit_of_memory_there_are_tables_alone() -> None:
    """The engine of vl-convert aborts its process, which is none of the notebook's."""
    script = "from tests.cli.report.test_notebook import analysis; print(analysis()._repr_html_())"
    found = python_of_few_addresses("-c", script)
    assert [element.tag for element in ElementTree.fromstring(found.stdout)] == ["table"], found.stderr
    assert "ulimit -v" in found.stderr
