"""Counters of Nsight Compute, as `ncu --csv` prints them: one value for every launched kernel and metric.

    counters = Counters.parse(text)
    counters.total("dram__bytes_read.sum"), counters.share("sm__warps_active.avg.pct_of_peak_sustained_active")

Two layouts are read. `--page raw` has a column for every metric and the units in a line of their own under the names;
the usual page has a line for every metric, with the columns "Metric Name", "Metric Unit" and "Metric Value" (Nsight
Compute CLI, https://docs.nvidia.com/nsight-compute/NsightComputeCli/, "Output Pages" and "Print Options"). Both begin
with the same columns about the launch, after whatever the program itself has printed.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from blocktune.kernels.files.foreign_text import cell
from blocktune.kernels.values.errors import UsageError

TIME = "gpu__time_duration.sum"
STALLED = ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio")
"""What the names of stall reasons begin and end with."""

FIRST_COLUMN = '"ID"'
"""What the table begins with, after whatever the program has printed."""

_NAME, _VALUE, _UNIT = "Metric Name", "Metric Value", "Metric Unit"
_SCALES = {
    "": 1.0, "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12,
}  # fmt: skip
"""Factors to microseconds and bytes, by the unit's name, small letters; what other units measure is left as it is."""


@dataclass(frozen=True, slots=True)
class LaunchCounters:
    """One launched kernel: its name, and values by metric. Times are in microseconds, sizes in bytes."""

    kernel: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counters:
    """The kernels of one call, in launch order."""

    launches: tuple[LaunchCounters, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what a CSV holds.

        Raises:
            UsageError: it holds no counters.
        """
        rows = _rows(text)
        if rows and not {"ID", "Kernel Name"} - set(rows[0]):
            launches = tuple(_by_line(rows) if _NAME in rows[0] else _by_column(rows))
            if any(launch.metrics for launch in launches):
                return cls(launches)
        raise UsageError(
            'This is no CSV of Nsight Compute: its first column is not "ID". Write one: ncu --import FILE.ncu-rep '
            "--csv --page raw > counters.csv"
        )

    def total(self, metric: str) -> float | None:
        """Return the sum over all launches; None where some launch lacks the metric."""
        values = [launch.metrics.get(metric) for launch in self.launches]
        return None if None in values else sum(value for value in values if value is not None)

    def share(self, metric: str) -> float | None:
        """Return the mean over all launches by their time, of a percentage or ratio; None where it is not known."""
        values, times = self._values(metric), self._values(TIME)
        if len(self.launches) == 1:
            return None if values is None else values[0]
        if values is None or times is None or not sum(times):
            return None
        return sum(value * time for value, time in zip(values, times, strict=True)) / sum(times)

    def busy_us(self, metric: str) -> float | None:
        """Return for how long a unit was busy, from the metric that has its percentage of the elapsed time."""
        values, times = self._values(metric), self._values(TIME)
        if values is None or times is None:
            return None
        return sum(value / 100 * time for value, time in zip(values, times, strict=True))

    def stalls(self) -> dict[str, float]:
        """Return the warps of a scheduler that wait for each reason when it issues an instruction, the most first."""
        first, last = STALLED
        names = {name for launch in self.launches for name in launch.metrics if name.startswith(first)}
        reasons = {name.removeprefix(first).removesuffix(last): self.share(name) for name in names}
        known = {reason: value for reason, value in reasons.items() if value is not None}
        return dict(sorted(known.items(), key=lambda item: (-item[1], item[0])))

    def _values(self, metric: str) -> list[float] | None:
        found = [launch.metrics[metric] for launch in self.launches if metric in launch.metrics]
        return found if len(found) == len(self.launches) else None

    def to_json(self) -> list[dict[str, Any]]:
        return [{"kernel": launch.kernel, "metrics": dict(launch.metrics)} for launch in self.launches]


def plain_table(text: str) -> str:
    """Return the table in a text, which may be from elsewhere, without cells that are formulas to a spreadsheet."""
    out = io.StringIO()
    rows = csv.reader(io.StringIO(text[text.index(FIRST_COLUMN) :]))
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
        [cell(value) for value in row] for row in rows
    )
    return out.getvalue()


def _rows(text: str) -> list[dict[str, str]]:
    """Return the lines of the table, each with a text for every column; none where there is no table."""
    start = text.find(FIRST_COLUMN)
    if start < 0:
        return []
    try:
        return [
            {name: row.get(name) or "" for name in row if name is not None}
            for row in csv.DictReader(io.StringIO(text[start:]))
        ]
    except csv.Error:
        return []


def _by_line(rows: Sequence[Mapping[str, str]]) -> Iterator[LaunchCounters]:
    """Yield the launches of a table with a line for every metric."""
    metrics: dict[str, dict[str, float]] = {}
    kernels: dict[str, str] = {}
    for row in rows:
        kernels[row["ID"]] = row["Kernel Name"]
        value = _number(row.get(_VALUE, ""), row.get(_UNIT, ""))
        if value is not None:
            metrics.setdefault(row["ID"], {})[row[_NAME]] = value
    return (LaunchCounters(kernel, metrics.get(number, {})) for number, kernel in kernels.items())


def _by_column(rows: Sequence[Mapping[str, str]]) -> Iterator[LaunchCounters]:
    """Yield the launches of a table with a column for every metric, whose first line has the units."""
    units, launches = ({}, rows) if rows[0]["ID"] else (rows[0], rows[1:])
    for row in launches:
        values = {name: _number(text, units.get(name, "")) for name, text in row.items() if "__" in name}
        yield LaunchCounters(row["Kernel Name"], {name: value for name, value in values.items() if value is not None})


def _number(text: str, unit: str) -> float | None:
    """Return a value in base units; None where it is no number, as `n/a`. Thousands have commas."""
    try:
        value = float(text.replace(",", "")) * _SCALES.get(unit.lower(), 1.0)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
