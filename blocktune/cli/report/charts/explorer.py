"""Blocks per multiprocessor over each resource that a block takes."""

import altair as alt

from blocktune.cli.report.charts.style import BLUE, DASHED, ORANGE, Spec, rows, spec_of

RESOURCES = {
    "registers": "registers per thread",
    "shared": "shared memory of a block, KiB",
    "warps": "warps of a block",
    "stages": "pipeline stages, as compiled",
    "carveout": "carve-out of shared memory, %",
}
"""What a curve is drawn over, with the title of its axis."""

TICKS = alt.ExprRef("sequence(0, domain('y')[1] + 1, max(1, ceil(domain('y')[1] / 5)))")
"""Whole numbers of blocks."""

GPUS = alt.Scale(domain=["A", "B"], range=[BLUE, ORANGE])


def curve(resource: str) -> Spec:
    """Return the step curves of both GPUs over one resource.

    The data set `curve` has the steps, `here` the kernel as a large dot and its compiled neighbours as small ones.
    """
    whole = (
        {"values": alt.ExprRef("sequence(ceil(domain('x')[0]), domain('x')[1] + 1)")} if resource == "stages" else {}
    )
    axis = alt.Axis(format="d", **whole)
    x = alt.X("x:Q", title=RESOURCES[resource], scale=alt.Scale(zero=False, nice=False), axis=axis)
    y = alt.Y("blocks:Q", title="blocks/SM", scale=alt.Scale(zero=True), axis=alt.Axis(values=TICKS, format="d"))
    colour = alt.Color("gpu:N", scale=GPUS, title="GPU", legend=None)
    steps = (
        alt.Chart(rows("curve"))
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(x=x, y=y, color=colour, strokeDash=alt.StrokeDash("gpu:N", legend=None, scale=_dashes()))
    )
    tooltip = [alt.Tooltip("label:N", title="config"), alt.Tooltip("x:Q", title=RESOURCES[resource]), "blocks:Q"]
    dots = (
        alt.Chart(rows("here"))
        .mark_point(filled=True, opacity=0.9)
        .encode(
            x=x,
            y=y,
            color=colour,
            size=alt.Size("kernel:O", scale=alt.Scale(domain=["this", "neighbour"], range=[130, 28]), legend=None),
            tooltip=tooltip,
        )
    )
    chart = alt.layer(steps, dots).properties(width="container", height=120)
    return spec_of(chart, f"Blocks per multiprocessor over {RESOURCES[resource]}, for GPU A and GPU B.")


def _dashes() -> alt.Scale:
    return alt.Scale(domain=["A", "B"], range=[[1, 0], DASHED])
