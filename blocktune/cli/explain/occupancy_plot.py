"""`tune occupancy --plot`: blocks per multiprocessor over each resource of a block, as steps in a terminal."""

from collections.abc import Iterator

from rich.text import Text

from blocktune.tuner.occupancy.curves import Curve

LABEL = 4
"""Columns left of the axis."""

LEAST_HEIGHT, MORE, MOST_HEIGHT = 4, 3, 12
"""Blocks that a plot shows at least, above the kernel's own, and at most; what is higher stands in the top line."""

STEP, FALL, HERE = "━", "│", "●"


def plot_lines(curves: dict[str, Curve], width: int) -> Iterator[Text]:
    """Yield the lines of one plot for every curve, the kernel as a dot."""
    yield Text(f"blocks/SM over each resource, the others as they are; {HERE} is this kernel", style="dim")
    for curve in curves.values():
        yield Text("")
        yield Text(curve.title, style="bold")
        yield from _plot(curve, max(20, width - LABEL - 2))


def _plot(curve: Curve, columns: int) -> Iterator[Text]:
    most = max(blocks for _, blocks in curve.steps)
    top = min(most, MOST_HEIGHT, max(LEAST_HEIGHT, curve.here[1] + MORE))
    first = curve.steps[0][0]
    values = [first + (curve.last - first) * place / (columns - 1) for place in range(columns)]
    levels = [min(top, curve.blocks_at(value)) for value in values]
    own = min(range(columns), key=lambda place: abs(values[place] - curve.here[0]))
    levels[own] = min(top, curve.here[1])
    for level in range(top, -1, -1):
        label = f"≥{level}" if level == top < most else str(level)
        line = Text(f"{label:>{LABEL}} ").append_text(_line(levels, level, own))
        line.rstrip()
        yield line
    yield Text(" " * (LABEL + 1) + _scale(curve, columns, own))


def _line(levels: list[int], level: int, own: int) -> Text:
    line = Text()
    for place, here in enumerate(levels):
        before = levels[place - 1] if place else here
        if place == own and here == level:
            line.append(HERE, style="bold red")
        elif here == level:
            line.append(STEP, style="blue")
        else:
            line.append(FALL if min(here, before) < level < max(here, before) else " ", style="blue")
    return line


def _scale(curve: Curve, columns: int, own: int) -> str:
    """Return the kernel's own value under its place, and the first and the last one where they have room."""
    first, here, last = (f"{value:.4g}" for value in (curve.steps[0][0], curve.here[0], curve.last))
    start = max(0, min(own - len(here) // 2, columns - len(here)))
    line = " " * start + here
    if len(first) < start:
        line = first + line[len(first) :]
    return line if len(line) >= columns - len(last) else line.ljust(columns - len(last)) + last
