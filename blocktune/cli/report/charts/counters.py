"""Counters of a GPU next to predictions: ratios, and the reasons for which warps waited."""

import altair as alt

from blocktune.cli.report.charts.style import BLUE, DASHED, GREY, Spec, rows, spec_of


def counter_ratios() -> Spec:
    """Return every prediction over its counter, a line of `counters` each; those on the rule are exact."""
    base = alt.Chart(rows("counters"))
    y = alt.Y("name:N", title=None, sort=alt.SortField("order"), axis=alt.Axis(labelLimit=200))
    x = alt.X(
        "ratio:Q", title="prediction over counter, logarithmic", scale=alt.Scale(type="log", nice=False, padding=40)
    )
    tooltip = [alt.Tooltip(f"{name}:N") for name in ("name", "predicted", "counted", "remark")]
    exact = alt.Chart(alt.Data(values=[{"ratio": 1}])).mark_rule(strokeWidth=2, color=GREY).encode(x=x)
    stems = base.mark_rule(color=BLUE, strokeDash=DASHED, strokeWidth=1.5).encode(
        x=x, x2=alt.X2(datum=1), y=y, tooltip=tooltip
    )
    dots = base.mark_point(filled=False, size=70, strokeWidth=2, color=BLUE).encode(x=x, y=y, tooltip=tooltip)
    words = [
        base.mark_text(align=align, dx=dx, fontSize=11).encode(
            x=x,
            y=y,
            text=alt.Text("ratio:Q", format=".2f"),
            opacity=alt.condition(f"datum.ratio {side} 1", alt.value(1), alt.value(0)),
        )
        for side, align, dx in (("<", "right", -9), (">=", "left", 9))
    ]
    chart = alt.layer(exact, stems, dots, *words).properties(width="container", height=alt.Step(24))
    return spec_of(chart, "Every prediction of the models over what was counted on the GPU.")


def stall_reasons() -> Spec:
    """Return the share of each reason for which warps waited, `stalls`, with the term of the model that it is near."""
    base = alt.Chart(rows("stalls"))
    y = alt.Y("reason:N", title=None, sort=alt.SortField("order"), axis=alt.Axis(labelLimit=200))
    x = alt.X("percent:Q", title="share of the waiting warps, %, counted", scale=alt.Scale(domain=[0, 100]))
    tooltip = [
        "reason:N",
        alt.Tooltip("percent:Q", format=".1f", title="share, %"),
        alt.Tooltip("words:N", title="near"),
    ]
    bars = base.mark_bar(color=BLUE, height={"band": 0.7}).encode(x=x.stack(None), y=y, tooltip=tooltip)
    words = base.mark_text(align="left", dx=6, fontSize=11).encode(x=x, y=y, text="words:N")
    chart = alt.layer(bars, words).properties(width="container", height=alt.Step(22))
    return spec_of(
        chart, "The reasons for which warps waited, by Nsight Compute, with the term of the model next to each."
    )
