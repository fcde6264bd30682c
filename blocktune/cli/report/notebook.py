"""Pictures for notebooks: what `_repr_html_` of an occupancy, an analysis and a sweep shows next to its numbers.

They are the charts of the report, drawn by vl-convert. A picture is an image of its own, since elements of several SVGs
in one page would share their names.
"""

import base64
import logging
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from blocktune.cli.report.drawing import svg
from blocktune.db.records.records import Outcome
from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.cost.analysis import Analysis
from blocktune.tuner.cost.term_texts import terms_of
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.calculator import Occupancy
from blocktune.tuner.occupancy.curves import curves_of
from blocktune.tuner.report.empty_cells import empty_cells, place_of

if TYPE_CHECKING:
    from blocktune.cli.report.charts.style import Spec

logger = logging.getLogger("blocktune")

MAX_KERNELS = 3
"""Whose heat maps a notebook shows, the one with the fastest config first; the report shows all."""

CURVES = {"registers": "registers", "shared_bytes": "shared", "num_warps": "warps"}
"""The curve of the report for each of ours."""

CURVE_WIDTH = 230

Rows = list[dict[str, Any]]


def pictures_of(value: Occupancy | Analysis | Sweep) -> str:
    """Return the pictures as HTML; empty where the libraries that draw them are not installed, or cannot run."""
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        return ""
    try:
        return "".join(_pictures(value))
    except UsageError as error:
        logger.warning("There are no pictures. %s", error)
        return ""


def _pictures(value: Occupancy | Analysis | Sweep) -> Iterator[str]:
    match value:
        case Occupancy():
            yield from _curves(value)
        case Analysis():
            yield _lanes(value)
        case Sweep():
            yield from _heat_maps(value)


def _curves(result: Occupancy) -> Iterator[str]:
    """Yield the steps of blocks over each resource, the kernel as a dot."""
    from blocktune.cli.report.charts import explorer

    for name, curve in curves_of(result).items():
        steps = [*curve.steps, (curve.last, curve.steps[-1][1])]
        rows: Rows = [{"gpu": "A", "x": x, "blocks": blocks} for x, blocks in steps]
        x, blocks = curve.here
        here = {"gpu": "A", "x": x, "blocks": blocks, "label": "this kernel", "kernel": "this"}
        spec = explorer.curve(CURVES[name]) | {"width": CURVE_WIDTH}
        yield picture(spec, {"curve": rows, "here": [here]})


def _lanes(analysis: Analysis) -> str:
    """Return what every unit takes alone, all of them together, and the measured time."""
    from blocktune.cli.report.charts import times

    found = analysis.breakdown
    if found is None:
        return ""
    config = analysis.config.label
    named = [(words, getattr(found, f"{name}_us")) for name, words in terms_of(analysis.shape).items()]
    rows: Rows = [
        {"config": config, "kind": "term", "term": words, "us": time_us, "order": order}
        for order, (words, time_us) in enumerate(named)
        if time_us
    ]
    place = {"config": config, "term": rows[0]["term"], "order": rows[0]["order"]}  # rules cross all lanes and add none
    rows.append(place | {"kind": "predicted", "us": found.total_us})
    if analysis.measured_us is not None:
        rows.append(place | {"kind": "measured", "us": analysis.measured_us})
    return picture(times.lanes(), {"lanes": rows})


def _heat_maps(sweep: Sweep) -> Iterator[str]:
    """Yield TFLOP/s of every tile, a picture for each of the first kernels."""
    from blocktune.cli.report.charts import heat_maps

    cells = _cells(sweep)
    rates = [cell["value"] for cell in cells if cell["value"] is not None]
    ends = {"low": min(rates, default=0.0), "high": max(rates, default=1.0)}
    for cell in cells:  # as the report has it: viridis is light above its middle
        cell["light"] = cell["value"] is not None and cell["value"] > 0.45 * ends["low"] + 0.55 * ends["high"]
    kernels = list(dict.fromkeys(cell["kernel"] for cell in cells))
    spec = heat_maps.heat_map(heat_maps.MEASURES["tflops"])
    for kernel in kernels[:MAX_KERNELS]:
        own = [cell for cell in cells if cell["kernel"] == kernel]
        yield f"<p>{escape(kernel)}</p>" + picture(spec, {"cells": own}, ends)


def _cells(sweep: Sweep) -> Rows:
    """Return the fastest config of every tile, the fastest first, then what has no time and what cannot exist."""
    scores = sweep.scores
    ranked = sorted(sweep.trials, key=lambda trial: scores.get(trial.config, float("inf")))
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for trial in ranked:
        timed = trial.outcome is Outcome.OK and bool(trial.time_us)
        value = sweep.shape.flops / trial.time_us / 1e6 if timed and trial.time_us else None
        spilled = trial.resources.spill_bytes if trial.resources else 0
        cells.setdefault(place_of(trial.config), _cell(place_of(trial.config), value) | {"spill_bytes": spilled})
    for empty in empty_cells(sweep):
        cells.setdefault(empty.place, _cell(empty.place, None))
    return list(cells.values())


def _cell(place: Sequence[Any], value: float | None) -> dict[str, Any]:
    names = ("kernel", "block_m", "block_n", "num_warps", "num_stages")
    state, number = ("failed", "") if value is None else ("timed", f"{value:.0f}")
    return dict(zip(names, place, strict=True)) | {"state": state, "value": value, "number": number, "picked": ""}


def picture(spec: "Spec", sets: Mapping[str, Rows], signals: Mapping[str, float] | None = None) -> str:
    """Return a chart of the report as an image in HTML.

    Args:
        spec: of the chart.
        sets: the rows of its data sets, by name.
        signals: values of its parameters, by name.

    Raises:
        UsageError: vl-convert cannot run here.
    """
    from blocktune.cli.report.charts.style import theme

    config = theme(dark=False) | {"background": "white"}
    drawn = _without_tooltips(spec) | {"datasets": dict(sets), "config": config}
    code = base64.b64encode(svg(drawn, signals or {}).encode()).decode()
    return f'<img alt="{escape(spec["description"])}" src="data:image/svg+xml;base64,{code}"/>'


def _without_tooltips(part: Any) -> Any:
    """Return a spec that asks for no texts under the pointer, which an image cannot show."""
    if isinstance(part, dict):
        return {name: _without_tooltips(value) for name, value in part.items() if name != "tooltip"}
    return [_without_tooltips(value) for value in part] if isinstance(part, list) else part
