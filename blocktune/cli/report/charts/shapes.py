"""Measurements over many shapes: heat maps, a ladder, block sizes and differences."""

import altair as alt

from blocktune.cli.report.charts.style import BLUE, DASHED, DIVERGING, GREY, ORANGE, RED, Spec, rows, spec_of

RATIOS = {"peer": "tuned over the fastest rival", "default": "tuned over the default"}
"""Measures of `shapes` that are ratios of speed; 1 is equal."""


def shape_map(measure: str) -> Spec:
    """Return the shapes of all benches, sequence by head dimension.

    Args:
        measure: a name of `RATIOS`, whose least and most the page sets as `low` and `high`; or `rung`, or `misses`.
    """
    if measure in RATIOS:
        ends = {"domainMin": alt.ExprRef("low"), "domainMax": alt.ExprRef("high")}
        scale = alt.Scale(scheme=DIVERGING, domainMid=1, reverse=True, **ends)
        colour = alt.Color(f"{measure}:Q", title=RATIOS[measure], scale=scale)
        text = alt.Text(f"{measure}:Q", format=".2f")
    elif measure == "misses":
        colour = alt.Color("misses:Q", title="calls without a measurement", scale=alt.Scale(scheme="oranges"))
        text = alt.Text("misses:Q", format=",d")
    else:
        colour, text = alt.Color("rung:N", title="source"), alt.Text("rung_letter:N")
    base = alt.Chart(rows("shapes")).transform_filter(f"isValid(datum.{measure})")
    x = alt.X("seq:O", title="sequence", axis=alt.Axis(labelAngle=0))
    y = alt.Y("dim:O", title="head_dim", sort="descending")
    tooltip = ["label:N", *(alt.Tooltip(f"{name}_text:N", title=name) for name in ("peer", "default", "rung"))]
    light = "datum.light" if measure in RATIOS else "false" if measure == "rung" else "true"
    squares = base.mark_rect(cursor="pointer", stroke="white").encode(x=x, y=y, color=colour, tooltip=tooltip)
    words = base.mark_text(fontSize=10, cursor="pointer").encode(
        x=x, y=y, text=text, tooltip=tooltip, color=alt.condition(light, alt.value("#101010"), alt.value("#ffffff"))
    )
    chart = (
        alt.layer(squares, words)
        .properties(width=alt.Step(46), height=alt.Step(30))
        .facet(alt.Facet("kind:N", title=None, header=alt.Header(labelAnchor="start")), columns=2)
        .add_params(alt.param(name="low", value=0.9), alt.param(name="high", value=1.1))
    )
    return spec_of(chart, f"Shapes by sequence and head dimension, coloured by {RATIOS.get(measure, measure)}.")


def contenders() -> Spec:
    """Return the rates of a bench's contenders, a line of dots for every shape."""
    chart = (
        alt.Chart(rows("contenders"))
        .mark_point(size=55, filled=True)
        .encode(
            x=alt.X("tflops:Q", title="TFLOP/s"),
            y=alt.Y("row:N", title=None, sort=alt.SortField("order"), axis=alt.Axis(labelLimit=330)),
            color=alt.Color("name:N", title=None),
            shape=alt.Shape("name:N", title=None),
            tooltip=[
                "label:N",
                "name:N",
                alt.Tooltip("tflops:Q", format=",.1f"),
                alt.Tooltip("time_us:Q", format=",.2f"),
            ],
        )
        .properties(width="container", height=alt.Step(17))
    )
    return spec_of(chart, "TFLOP/s of all contenders of a bench, for every shape.")


def ladder() -> Spec:
    """Return a ladder as a waterfall: every step's bar leads from the time before it to its own, dashed where that is
    predicted."""
    base = alt.Chart(rows("ladder"))
    y = alt.Y("step:N", title=None, sort=alt.SortField("order"), axis=alt.Axis(labelLimit=300))
    x = alt.X("time_us:Q", title="µs, logarithmic", scale=alt.Scale(type="log", nice=False, padding=50))
    tooltip = [
        "step:N",
        "config:N",
        alt.Tooltip("time_us:Q", format=",.1f", title="time, µs"),
        "origin:N",
        alt.Tooltip("predicted_us:Q", format=",.1f", title="predicted, µs"),
        alt.Tooltip("band:N", title="error of predictions"),
        alt.Tooltip("over_before:Q", format=".2f", title="faster than the step before"),
        "note:N",
    ]
    changes, clocked = alt.Scale(domain=["faster", "slower"], range=[BLUE, ORANGE]), "datum.origin == 'measured'"
    bars = base.mark_bar(height={"band": 0.6}).encode(
        x=x, x2="before_us:Q", y=y, tooltip=tooltip,
        color=alt.Color("change:N", title=None, scale=changes),
        stroke=alt.Stroke("change:N", title=None, scale=changes),
        fillOpacity=alt.condition(clocked, alt.value(1), alt.value(0.2)),
        strokeDash=alt.condition(clocked, alt.value([1, 0]), alt.value(DASHED)),
    )  # fmt: skip
    shown = alt.condition(clocked, alt.value(1), alt.value(0))
    ends = base.mark_tick(thickness=3, color=RED).encode(x=x, y=y, opacity=shown, tooltip=tooltip)
    model = base.mark_point(
        shape="circle", filled=False, strokeWidth=1.5, size=60, color=GREY
    ).encode(x=alt.X("predicted_us:Q"), y=y, tooltip=tooltip)  # fmt: skip
    words = base.mark_text(align="left", dx=6, fontSize=11).encode(x=alt.X("right_us:Q"), y=y, text="gain:N")
    return spec_of(
        alt.layer(bars, ends, model, words).properties(width="container", height=alt.Step(30)),
        "How attention became fast: the time of every step, with what it gained over the one before.",
    )


def block_sizes() -> Spec:
    """Return time, bytes and the tail over the block sizes of one kernel: `blocks` with a `side` and a `quantity`."""
    base = alt.Chart(rows("blocks"))
    encoded = base.encode(
        x=alt.X("size:O", title="rows of a tile", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title=None),
        tooltip=["config:N", "quantity:N", "kind:N", alt.Tooltip("value:Q", format=",.4~g")],
    )
    line = encoded.mark_line(strokeWidth=1.5, color=BLUE).encode(
        strokeDash=alt.StrokeDash("kind:N", title=None, scale=_kinds())
    )
    dots = encoded.mark_point(size=45, color=BLUE).encode(
        fill=alt.condition("datum.kind == 'measured'", alt.value(BLUE), alt.value("transparent"))
    )
    chart = (
        alt.layer(line, dots)
        .properties(width=230, height=90)
        .facet(
            row=alt.Row("quantity:N", title=None, sort=["time, µs", "GB of device memory", "tail, % of the time"]),
            column=alt.Column("side:N", title=None),
        )
        .resolve_scale(y="independent", x="independent")
    )
    return spec_of(chart, "Time, bytes of device memory and the tail of the last wave, over block_m and block_n.")


def _kinds() -> alt.Scale:
    return alt.Scale(domain=["measured", "predicted"], range=[[1, 0], DASHED])


def differences() -> Spec:
    """Return the winners' times in one store over those in another."""
    chart = (
        alt.Chart(rows("differences"))
        .mark_point(filled=True, size=60)
        .encode(
            x=alt.X("ratio:Q", title="time now over time before", scale=alt.Scale(zero=False)),
            y=alt.Y("label:N", title=None, axis=alt.Axis(labelLimit=330)),
            color=alt.Color("change:N", title=None),
            shape=alt.Shape("change:N", title=None),
            tooltip=["label:N", "change:N", "before:N", "after:N", alt.Tooltip("ratio:Q", format=".4f")],
        )
        .properties(width="container", height=alt.Step(17))
    )
    return spec_of(chart, "Winners that differ between two stores, by the ratio of their times.")
