"""Where the time of a config goes: lanes by unit, and the roofline."""

from collections.abc import Mapping
from typing import Any

import altair as alt

from blocktune.cli.report.charts.style import BLUE, DASHED, GREEN, GREY, ORANGE, RED, Spec, rows, spec_of

LEGEND = alt.Legend(columns=1, labelLimit=420)


def lanes() -> Spec:
    """Return the lanes of the configs that are compared.

    The data set `lanes` has rows of a `kind`: `term` is what a unit takes alone by the model, `predicted` their total,
    `measured` the time, `range` the least and most of its rounds.
    """
    base = alt.Chart(rows("lanes"))
    y = alt.Y("term:N", title=None, sort=alt.SortField("order"), axis=alt.Axis(labelLimit=320))
    x = alt.X("us:Q", title="µs", axis=alt.Axis(tickCount=8))
    bars = (
        base.transform_filter("datum.kind == 'term'")
        .mark_bar(fillOpacity=0.25, stroke=BLUE, strokeDash=DASHED, color=BLUE, height={"band": 0.7})
        .encode(x=x, y=y, tooltip=["term:N", alt.Tooltip("us:Q", title="alone, predicted, µs", format=",.1f")])
    )
    spread = (
        base.transform_filter("datum.kind == 'range'")
        .mark_rect(opacity=0.25, color=RED)
        .encode(x=alt.X("low:Q", title="µs"), x2="high:Q")
    )
    total = (
        base.transform_filter("datum.kind == 'predicted'")
        .mark_rule(strokeDash=DASHED, strokeWidth=2, color=BLUE)
        .encode(x=x, tooltip=[alt.Tooltip("us:Q", title="all together, predicted, µs", format=",.1f")])
    )
    clock = (
        base.transform_filter("datum.kind == 'measured'")
        .mark_rule(strokeWidth=2.5, color=RED)
        .encode(x=x, tooltip=[alt.Tooltip("us:Q", title="measured, µs", format=",.3f")])
    )
    chart = (
        alt.layer(bars, spread, total, clock)
        .properties(width=380, height=alt.Step(17))
        .facet(row=alt.Row("config:N", title=None, header=alt.Header(labelOrient="top", labelAnchor="start")))
        .resolve_scale(y="independent")
    )
    words = "What every unit takes alone by the model, their overlapping total, and the measured time."
    return spec_of(chart, words)


def roofline() -> Spec:
    """Return the roofs of a device, `roofs`, and what ran under them, `points`."""
    place = {
        "x": alt.X("intensity:Q", title="FLOP per byte", scale=alt.Scale(type="log", nice=False)),
        "y": alt.Y("tflops:Q", title="TFLOP/s", scale=alt.Scale(type="log", nice=False)),
    }
    names = [
        alt.Chart(rows("points"))
        .transform_filter(f"datum.shown == '{side}'")
        .mark_text(align=align, dx=dx, fontSize=10)
        .encode(**place, text="name:N")
        for side, align, dx in (("left", "right", -8), ("right", "left", 8))
    ]
    chart = alt.layer(_roofs(place), _points(place), *names).properties(width="container", height=300)
    return spec_of(chart, "The roofline of the device with the selected configs and the historical kernels.")


def _roofs(place: Mapping[str, Any]) -> alt.Chart:
    """Return a line for each roof."""
    dash = alt.StrokeDash("roof:N", title="roof", legend=alt.Legend(columns=1))
    return (
        alt.Chart(rows("roofs"))
        .mark_line(strokeWidth=1.6, color=GREY)
        .encode(**place, detail="roof:N", strokeDash=dash)
    )


def _points(place: Mapping[str, Any]) -> alt.Chart:
    """Return a point for each config: its colour is its group, its shape where its bytes come from; filled ones were
    measured."""
    groups = alt.Scale(range=[RED, BLUE, GREEN, ORANGE])
    return (
        alt.Chart(rows("points"))
        .mark_point(size=70, strokeWidth=1.8, filled=True)
        .encode(
            **place,
            color=alt.Color("group:N", title=None, scale=groups, legend=LEGEND),
            stroke=alt.Stroke("group:N", title=None, scale=groups),
            fillOpacity=alt.condition("datum.kind == 'measured'", alt.value(0.85), alt.value(0)),
            shape=alt.Shape("memory:N", title="bytes from", legend=alt.Legend(columns=1)),
            tooltip=[
                "name:N",
                alt.Tooltip("detail:N", title="of"),
                "kind:N",
                alt.Tooltip("tflops:Q", format=",.1f", title="TFLOP/s"),
                alt.Tooltip("intensity:Q", format=",.1f", title="FLOP per byte"),
                alt.Tooltip("memory:N", title="bytes from"),
            ],
        )
    )
