"""How a search went and who won: best so far, strategies, finalists, and the state of the GPU."""

import altair as alt

from blocktune.cli.report.charts.style import BLUE, GREY, ORANGE, Spec, rows, spec_of


def progress(over: str) -> Spec:
    """Return the best so far of a search; over: `trial` or `seconds`."""
    title = {"trial": "trials", "seconds": "seconds of measuring and compiling"}[over]
    x = alt.X(f"{over}:Q", title=title)
    base = alt.Chart(rows("progress"))
    every = base.mark_circle(size=9, opacity=0.4, color=GREY).encode(
        x=x,
        y=alt.Y("tflops:Q", title="TFLOP/s"),
        tooltip=["config:N", alt.Tooltip("tflops:Q", format=",.1f", title="TFLOP/s"), "trial:Q"],
    )
    best = base.mark_line(interpolate="step-after", strokeWidth=2.2, color=BLUE).encode(x=x, y="best:Q")
    return spec_of(
        alt.layer(every, best).properties(width="container", height=210),
        f"TFLOP/s of every trial and the best so far, over {title}.",
    )


def strategies(shown: str) -> Spec:
    """Return how far replayed searches end from the best, by measurements.

    Args:
        shown: the strategy whose band is drawn at first; the legend chooses others.
    """
    chosen = alt.selection_point(fields=["strategy"], bind="legend", value=[{"strategy": shown}], name="chosen")
    base = alt.Chart(rows("strategies"))
    x = alt.X("measurements:Q", title="measurements", scale=alt.Scale(type="log", base=2), axis=alt.Axis(format="d"))
    band = base.mark_area(opacity=1, fillOpacity=0.22).encode(
        x=x, y=alt.Y("low:Q", title="slower than the best, %"), y2="high:Q", color=alt.Color("strategy:N"),
    ).transform_filter(chosen)  # fmt: skip
    line = base.mark_line(point=True).encode(
        x=x,
        y="mean:Q",
        color=alt.Color("strategy:N", title="strategy", legend=alt.Legend(symbolOpacity=1)),
        strokeDash=alt.StrokeDash("strategy:N", legend=None),
        opacity=alt.condition(chosen, alt.value(1), alt.value(0.55)),
        tooltip=[
            "strategy:N",
            "measurements:Q",
            alt.Tooltip("mean:Q", format=".2f", title="mean, %"),
            alt.Tooltip("low:Q", format=".2f"),
            alt.Tooltip("high:Q", format=".2f"),
            alt.Tooltip("seconds:Q", format=".1f", title="seconds"),
        ],
    ).add_params(chosen)  # fmt: skip
    this = base.transform_filter("isValid(datum.this)").mark_point(shape="diamond", size=60).encode(
        x=x,
        y="this:Q",
        color="strategy:N",
        opacity=alt.condition(chosen, alt.value(1), alt.value(0)),
        tooltip=["strategy:N", "measurements:Q", alt.Tooltip("this:Q", format=".2f", title="this sweep, %")],
    )  # fmt: skip
    return spec_of(
        alt.layer(band, line, this).properties(width="container", height=230),
        "How much slower than the best a replayed search's result is, by strategy and number of measurements.",
    )


def importance() -> Spec:
    """Return how much each parameter decides: `importance` with a share of each."""
    chart = (
        alt.Chart(rows("importance"))
        .mark_bar(color=BLUE, height=12)
        .encode(
            x=alt.X("share:Q", title="importance", axis=alt.Axis(format="%", tickCount=5)),
            y=alt.Y("parameter:N", title=None, sort=alt.SortField("share", order="descending")),
            tooltip=["parameter:N", alt.Tooltip("share:Q", format=".1%")],
        )
        .properties(width="container", height=alt.Step(19))
    )
    return spec_of(chart, "How much each parameter of a config decides whether it is among the fastest.")


def finalists() -> Spec:
    """Return times over the fastest: `finalists` with the range of their rounds, `tie` with the band of equals."""
    base = alt.Chart(rows("finalists"))
    y = alt.Y("name:N", title=None, sort=alt.SortField("ratio"), axis=alt.Axis(labelLimit=420))
    x = alt.X("ratio:Q", title="ratio of times", scale=alt.Scale(zero=False))
    band = (
        alt.Chart(rows("tie"))
        .mark_rect(color=ORANGE, opacity=0.3)
        .encode(x=alt.X("low:Q", title="ratio of times"), x2="high:Q")
    )
    spread = base.mark_rule(color=BLUE, strokeWidth=1.5).encode(x="low:Q", x2="high:Q", y=y)
    dots = base.mark_point(filled=True, size=60, color=BLUE).encode(
        x=x,
        y=y,
        shape=alt.Shape("role:N", title=None),
        tooltip=[
            "config:N",
            "role:N",
            alt.Tooltip("ratio:Q", format=".4f"),
            alt.Tooltip("low:Q", format=".4f"),
            alt.Tooltip("high:Q", format=".4f"),
            "rounds:Q",
        ],
    )
    return spec_of(
        alt.layer(band, spread, dots).properties(width="container", height=alt.Step(19)),
        "The fastest configs with the range of their rounds and the band in which they count as equal.",
    )


def states() -> Spec:
    """Return the state of the GPU over time, one strip for each quantity."""
    chart = (
        alt.Chart(rows("states"))
        .mark_circle(size=12, opacity=0.7)
        .encode(
            x=alt.X("seconds:Q", title="seconds"),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=3)),
            color=alt.Color("clocks:N", title=None),
            tooltip=["seconds:Q", "quantity:N", "value:Q", "clocks:N"],
        )
        .properties(width=640, height=64)
        .facet(row=alt.Row("quantity:N", title=None, header=alt.Header(labelOrient="top", labelAnchor="start")))
        .resolve_scale(y="independent", x="independent")
    )
    return spec_of(chart, "Clock, temperature and power of the GPU while it was measured.")
