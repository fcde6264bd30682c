"""Heat maps of a sweep: block_m by block_n, one small map for every number of warps and stages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt

from blocktune.cli.report.charts.style import DIVERGING, HATCH, MEASURED, PREDICTED, RED, Spec, rows, spec_of

CELL = 38
"""Pixels of a cell's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The quantity that the colour of a cell shows.

    scheme: of the colours.
    middle: the value of the neutral colour, where there is one.
    """

    title: str
    scheme: str
    middle: float | None = None

    @property
    def scale(self) -> alt.Scale:
        """From the least to the most of all maps that stand together, which the page sets as `low` and `high`."""
        ends = {"domainMin": alt.ExprRef("low"), "domainMax": alt.ExprRef("high")}
        if self.middle is None:
            return alt.Scale(scheme=self.scheme, **ends)
        return alt.Scale(scheme=self.scheme, domainMid=self.middle, clamp=True, **ends)


MEASURES = {
    "tflops": Measure(title="TFLOP/s, measured", scheme=MEASURED),
    "share": Measure(title="% of the best, measured", scheme=MEASURED),
    "predicted": Measure(title="TFLOP/s, predicted", scheme=PREDICTED),
    "error": Measure(title="model's error, %", scheme=DIVERGING, middle=0.0),
}

FACTS = {
    "config": "config",
    "time": "measured",
    "rounds": "rounds",
    "predicted": "predicted",
    "resources": "resources",
    "spilled": "spilled",
    "blocks": "blocks/SM",
    "variants": "variants of the tile",
}
"""Texts of a cell that the pointer shows."""


def heat_map(measure: Measure) -> Spec:
    """Return the maps of one kernel.

    Of the data set `cells`, rows with the `state` "timed" have a `value`, and a `number` that says it. Others are
    hatched and say why in `reason`. A triangle marks spilled registers.
    """
    x = alt.X("block_n:O", title="block_n", axis=alt.Axis(labelAngle=0))
    y = alt.Y("block_m:O", title="block_m", sort="descending")
    base = alt.Chart(rows("cells"))
    timed, other = base.transform_filter("datum.state == 'timed'"), base.transform_filter("datum.state != 'timed'")
    layers = (_squares(timed, measure), _hatch_cells(other), *_marks(timed))
    chart = (
        alt.layer(*(layer.encode(x=x, y=y) for layer in layers))
        .properties(width=alt.Step(CELL), height=alt.Step(CELL))
        .facet(row=_facet(alt.Row, "num_warps", "warps"), column=_facet(alt.Column, "num_stages", "stages"), spacing=14)
        .add_params(alt.param(name="low", value=0), alt.param(name="high", value=1))
    )
    return spec_of(chart, f"{measure.title} of every tile of one kernel, by warps and stages.")


def _tooltip() -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{name}:N", title=title) for name, title in FACTS.items()]


def _squares(timed: alt.Chart, measure: Measure) -> alt.Chart:
    """Return a coloured square for each cell, in which an area can be brushed."""
    brush = alt.selection_interval(name="brush", encodings=["x", "y"])
    return (
        timed.mark_rect(cursor="pointer", stroke="white", strokeWidth=1)
        .encode(
            color=alt.Color("value:Q", scale=measure.scale, title=measure.title, legend=alt.Legend(gradientLength=160)),
            tooltip=_tooltip(),
            opacity=alt.condition(brush, alt.value(1), alt.value(0.35)),
        )
        .add_params(brush)
    )


def _hatch_cells(other: alt.Chart) -> alt.Chart:
    """Return a hatched square for each cell without a time."""
    return other.mark_point(shape=HATCH, size=900, strokeWidth=1, opacity=0.5, color="#808080").encode(
        tooltip=[alt.Tooltip("config:N", title="config"), alt.Tooltip("reason:N", title="not timed")]
    )


def _marks(timed: alt.Chart) -> Iterator[alt.Chart]:
    """Yield what stands on a square: its number, a triangle for spills, and the frame and letter of a picked config."""
    readable = alt.condition("datum.light", alt.value("#101010"), alt.value("#ffffff"))
    yield timed.mark_text(fontSize=10, cursor="pointer").encode(text="number:N", color=readable, tooltip=_tooltip())
    yield timed.transform_filter("datum.spill_bytes > 0").mark_point(
        shape="triangle-up", filled=True, size=64, color=RED, stroke="white", strokeWidth=0.7,
        xOffset=CELL // 3, yOffset=-CELL // 3,
    ).encode(tooltip=_tooltip())  # fmt: skip
    picked = timed.transform_filter("datum.picked != ''")
    yield picked.mark_rect(filled=False, strokeWidth=3, stroke=RED)
    yield picked.mark_text(fontSize=11, fontWeight="bold", xOffset=-CELL // 3, yOffset=-CELL // 3).encode(
        text="picked:N", color=readable
    )


def _facet(kind: type[Any], name: str, words: str) -> Any:
    """Return the rows or columns of small maps, each with its number and what that counts."""
    numbered = f"datum.value + (datum.value == 1 ? ' {words[:-1]}' : ' {words}')"
    return kind(f"{name}:O", title=None, header=alt.Header(labelExpr=numbered))
