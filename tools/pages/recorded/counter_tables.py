"""The tables of blocktune/results/*.counters.csv, which `make counters` records: the model next to the counters."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blocktune.tuner.profile.comparison import Row
    from blocktune.tuner.profile.counter_file import CounterFile

PLACE = "*.counters.csv"
"""What a page names for the tables of all such files."""

NO_COUNTERS = (
    "No counters are here yet: `make counters RECORD=blocktune/results/DEVICE` records them on a GPU with Nsight "
    "Compute, `make results` shows them."
)
SHOWN_STALLS = 4
"""Reasons for waiting that a page names, the most frequent first."""


def is_counters(path: Path) -> bool:
    """Return whether a page asks for the tables of all counters."""
    return path.name == PLACE


def block(place: Path) -> str:
    """Return the tables of the files of a pattern such as blocktune/results/*.counters.csv, or how they come about.

    Raises:
        UsageError: a file does not say of which config its counters are.
    """
    files = sorted(place.parent.glob(place.name))
    return "\n\n".join("\n".join(_table(path)) for path in files) if files else NO_COUNTERS


def _table(path: Path) -> Iterator[str]:
    from blocktune.tuner.profile.counter_file import CounterFile

    file = CounterFile.read(path)
    analysis = file.analysis
    day = f", {file.recorded_on}" if file.recorded_on else ""
    yield f"`{analysis.config.label}`, {analysis.shape.label} on {analysis.device.name}{day} ({path.name}):"
    yield ""
    yield "| | predicted | counted | ratio | |"
    yield "| --- | ---: | ---: | ---: | --- |"
    yield from map(_line, file.rows())
    if words := _stalls(file):
        yield ""
        yield words


def _line(row: "Row") -> str:
    from blocktune.tuner.profile.comparison import in_words

    both = [in_words(value, row.unit) for value in (row.predicted, row.counted)]
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {' | '.join((row.name, *both, ratio, row.remark or '-'))} |"


def _stalls(file: "CounterFile") -> str:
    """Return in a sentence what warps waited for most; empty where that was not counted."""
    found = [f"{100 * each.share:.0f} % {each.reason.replace('_', ' ')}" for each in file.stalls()[:SHOWN_STALLS]]
    return f"Of the waiting warps: {', '.join(found)}." if found else ""
