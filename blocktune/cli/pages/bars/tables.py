"""The table of bars, and what is below them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from blocktune.cli.output.document_tables import markdown_table
from blocktune.cli.output.render import short_commits
from blocktune.cli.pages.bars.backwards import BACKWARDS
from blocktune.cli.pages.bars.bar import Bar
from blocktune.cli.pages.bars.cells import Measurement
from blocktune.cli.pages.bars.decoding import DECODING
from blocktune.cli.pages.bars.forwards import FORWARDS
from blocktune.cli.tune.bench import geometric_mean

FILE = "bars"
"""What stands in place of a file's name."""

BARS = (*FORWARDS, *BACKWARDS, *DECODING)
COLUMNS = ("what", "bar", "device, day, commit", "next to", "cells", "lowest", "highest", "mean", "below")
WORDS = (0, 1, 2, 3)

NOT_PROFILED = "What limits it was not profiled."


def block(results: Path) -> str:
    """Return the table of all bars and the list of what is below them, made of a folder of results."""
    measured = [(bar, _measurements(bar, results)) for bar in BARS]
    lines = [line for bar, found in measured for line in _lines(bar, found)]
    below = [line for bar, found in measured if (line := _below(bar, found))]
    caption = _caption([measurement for _, found in measured for measurement in found])
    return "\n\n".join((caption, markdown_table(COLUMNS, lines, words=WORDS), "Below their bars:", "\n".join(below)))


def _measurements(bar: Bar, results: Path) -> list[Measurement]:
    return [measurement for source in bar.sources for measurement in source.read(results)]


def _caption(measurements: Iterable[Measurement]) -> str:
    versions: dict[str, set[str]] = {}
    for measurement in measurements:
        for name, version in measurement.software.items():
            versions.setdefault(name, set()).add(version)
    named = ", ".join(f"{name} {' and '.join(sorted(versions[name]))}" for name in sorted(versions))
    return f"Ratios of median times ({named}); *mean* is the geometric mean of the cells, *below* counts cells."


def _lines(bar: Bar, measurements: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """Return one line of the table for every measurement, or one that says that there is none."""
    if not measurements:
        return [(bar.what, bar.label, "not measured", *("-",) * (len(COLUMNS) - 3))]
    return [(bar.what, bar.label, *_cells(bar, measurement)) for measurement in measurements]


def _cells(bar: Bar, measurement: Measurement) -> tuple[str, ...]:
    ratios = [cell.ratio for cell in measurement.cells]
    place = ", ".join((measurement.device, measurement.taken_at[:10], *short_commits(measurement.commits)))
    numbers = (f"{ratio:.3f}" for ratio in (min(ratios), max(ratios), geometric_mean(ratios)))
    below = sum(ratio < bar.least for ratio in ratios)
    return (place, ", ".join(measurement.rivals), str(len(ratios)), *numbers, str(below))


def _below(bar: Bar, measurements: Sequence[Measurement]) -> str:
    """Return what is below a bar, by device, and what limits it; empty where nothing is."""
    devices = [
        f"{measurement.device}: {missed}" for measurement in measurements if (missed := _missed(bar, measurement))
    ]
    if not devices:
        return ""
    return f"- **{bar.what}**, {bar.label}. {'. '.join(devices)}. {bar.limit or NOT_PROFILED}"


def _missed(bar: Bar, measurement: Measurement) -> str:
    """Return the cells that are below a bar, and the mean if it is; empty where nothing is."""
    alone = len(measurement.rivals) == 1
    cells = [cell for cell in measurement.cells if cell.ratio < bar.least]
    missed = [f"{cell.label} {cell.ratio:.3f}" + ("" if alone else f" {cell.rival}") for cell in cells]
    mean = geometric_mean(cell.ratio for cell in measurement.cells)
    missed += [f"mean {mean:.3f}"] if bar.mean is not None and mean < bar.mean else []
    return "; ".join(missed)
