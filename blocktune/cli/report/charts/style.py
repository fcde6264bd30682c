"""How all charts look: colours that colour-blind readers tell apart, in light and in dark.

Measured values are filled and solid. Predicted ones are hollow or dashed, and in heat maps of another colour scheme.
"""

from typing import Any

import altair as alt

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f7f7f",
)  # fmt: skip
"""The palette of Okabe and Ito (jfly.uni-koeln.de/color), its yellow darkened for white paper."""

BRIGHTER = {BLUE: SKY, RED: "#ff8a3d", GREY: "#a8a8b0", GREEN: "#2fcf9f"}
"""What a dark page has in place of the dark colours."""

PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)

MEASURED, PREDICTED = "viridis", "purples"
"""Colour schemes of heat maps."""

DIVERGING = "blueorange"

DASHED = [5, 3]
"""Of lines and outlines that show a prediction."""

HATCH = "M-1,0L0,-1M-1,1L1,-1M0,1L1,0"
"""Three strokes that fill a cell, as a path of a point of size 4."""

Spec = dict[str, Any]


def rows(name: str) -> alt.NamedData:
    """Return the data set that the page fills in under this name."""
    return alt.NamedData(name=name)


def theme(*, dark: bool) -> Spec:
    """Return the configuration of all charts for a light or a dark page."""
    ink, faint, grid = ("#e8e8e8", "#b4b4b4", "#3a3a3f") if dark else ("#16161a", "#54545c", "#e2e2e6")
    palette = (BLUE, ORANGE, GREEN, PINK, YELLOW, RED, GREY) if dark else PALETTE  # the brighter blue is the sky's
    axis = {"labelColor": faint, "titleColor": faint, "gridColor": grid, "domainColor": grid, "tickColor": grid}
    return {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": grid},
        "axisQuantitative": {"labelOverlap": "greedy", "labelSeparation": 6},
        "axis": axis | {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"},
        "legend": {"labelColor": faint, "titleColor": faint, "titleFontWeight": "normal", "orient": "top"}
        | {"symbolBaseFillColor": faint, "symbolBaseStrokeColor": faint},
        "header": {"labelColor": ink, "titleColor": faint, "titleFontWeight": "normal", "labelFontSize": 11},
        "title": {"color": ink, "fontSize": 13, "anchor": "start"},
        "text": {"color": ink},
        "rule": {"color": ink},
        "range": {"category": [BRIGHTER.get(colour, colour) if dark else colour for colour in palette]},
    }


def spec_of(chart: alt.TopLevelMixin, description: str) -> Spec:
    """Return the spec of a chart without Altair's own configuration.

    Args:
        chart: any chart.
        description: what a screen reader says of it.
    """
    spec: Spec = chart.to_dict(validate=True)
    spec.pop("config", None)
    return spec | {"description": description}
