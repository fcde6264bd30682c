"""The roofline of a device in a terminal: TFLOP/s over FLOP per byte, both as logarithms."""

import math
from collections.abc import Iterator, Mapping

from rich.text import Text

from blocktune.tuner.profile.ceilings import Ceiling

HEIGHT = 14
LABEL = 6
"""Columns left of the axis."""

FIRST, LAST = 0.5, 8192.0
"""FLOP per byte at the ends of the axis."""

CATALOGUE, MEASURED = "·", "━"
STYLES = {"l2": "green", "memory": "blue"}
"""The colour of each roof; the upper one is drawn first."""


def roofline_lines(ceilings: Mapping[str, Ceiling], width: int) -> Iterator[Text]:
    """Yield the lines of the drawing: the roofs of memory and L2 under the rate of matrix products."""
    columns = max(24, width - LABEL - 2)
    places = [FIRST * (LAST / FIRST) ** (column / (columns - 1)) for column in range(columns)]
    peaks = [value for value in (ceilings["matrix"].catalogue, ceilings["matrix"].measured) if value is not None]
    top = 2 ** math.ceil(math.log2(max(peaks)))
    bottom = FIRST * min(one.known for name, one in ceilings.items() if name in STYLES) / 1e3
    grid = [[(" ", "")] * columns for _ in range(HEIGHT)]
    for sign, measured in ((CATALOGUE, False), (MEASURED, True)):
        for name, style in STYLES.items():
            roof, peak = (_value(ceilings[each], measured) for each in (name, "matrix"))
            if roof is None or peak is None:
                continue
            for column, intensity in enumerate(places):
                rate = min(peak, intensity * roof / 1e3)
                row = round((HEIGHT - 1) * math.log(rate / bottom) / math.log(top / bottom))
                if 0 <= row < HEIGHT:
                    grid[row][column] = (sign, style)
    yield Text("TFLOP/s over FLOP per byte: under L2 (left roof) and device memory (right roof)", style="bold")
    yield from _rows(grid, bottom, top)
    yield Text(" " * LABEL + _scale(columns))
    yield Text(f"{CATALOGUE} catalogue   {MEASURED} measured", style="dim")


def _value(ceiling: Ceiling, measured: bool) -> float | None:
    return ceiling.measured if measured else ceiling.catalogue


def _rows(grid: list[list[tuple[str, str]]], bottom: float, top: float) -> Iterator[Text]:
    """Yield the lines from the top on, every third one with its rate."""
    for row in range(HEIGHT - 1, -1, -1):
        rate = bottom * (top / bottom) ** (row / (HEIGHT - 1))
        number = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        label = number if (HEIGHT - 1 - row) % 3 == 0 else ""
        line = Text(f"{label:>{LABEL - 1}} ")
        for sign, style in grid[row]:
            line.append(sign, style=style)
        line.rstrip()
        yield line


def _scale(columns: int) -> str:
    """Return powers of four under their places, as far as they have room."""
    line = ""
    for power in range(0, round(math.log2(LAST)) + 1, 2):
        place = round((columns - 1) * math.log(2**power / FIRST) / math.log(LAST / FIRST))
        text = str(2**power)
        if len(line) < place <= columns - len(text):
            line = line.ljust(place) + text
    return line
