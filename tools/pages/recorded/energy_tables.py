"""The table of what a study of energies found: whether the fastest config of a shape also takes the least energy."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from blocktune.cli.output.json_files import read_document

FORMAT, SCHEMA = "blocktune-energy", 1

SUFFIX = ".energy.json"
"""How the name of such a file in results/ ends."""

NO_STUDY = (
    "No study of energies is here yet: `python -m tools.bench.energy_study --out "
    "results/DEVICE.energy.json` makes it, `make results` shows it."
)
COLUMNS = ("shape", "fastest", "time", "energy", "least energy", "time", "energy", "energy of the fastest / least")


def block(path: Path) -> str:
    """Return the table of a file with its conclusion, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    if not path.exists():
        return NO_STUDY
    document = read_document(path, "results", FORMAT, SCHEMA)
    return "\n\n".join((_caption(document), _table(document["rows"]), conclusion(document["rows"])))


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return on how many shapes the winner by energy is another one than by time, and what it saves and costs there."""
    other = [row for row in rows if row["differs"]]
    if not other:
        return f"On none of {len(rows)} shapes a finalist takes less energy than the fastest beyond the noise."
    saved = geometric_mean([row["saved"]["median"] for row in other])
    slower = geometric_mean([row["frugal"]["time_us"] / row["fastest"]["time_us"] for row in other])
    return (
        f"On {len(other)} of {len(rows)} shapes a finalist takes less energy than the fastest beyond the noise (bold): "
        f"{100 * (1 - 1 / saved):.1f} % less at {slower:.3f} of its time, in the geometric mean of these shapes."
    )


def _caption(document: Mapping[str, Any]) -> str:
    environment = document["environment"]
    days = sorted({row["created_at"][:10] for row in document["rows"]})
    software = ", ".join(f"{name} {environment[name]}" for name in ("triton", "torch", "driver"))
    return (
        f"{document['device']} on {' and '.join(days)} ({software}, power limit {environment['power_limit_w']} W). "
        "Times are those of the finals, with a cold L2 cache, energies those of bursts of launches with a warm one, "
        "both medians. The last column is the median of paired rounds, with the 5th and 95th percentile; 1 where the "
        "fastest is the most frugal too."
    )


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    marks = ["---", "---", "---:", "---:", "---", "---:", "---:", "---:"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, marks, *map(_cells, rows)))


def _cells(row: Mapping[str, Any]) -> list[str]:
    fastest, frugal, saved = row["fastest"], row["frugal"], row["saved"]
    ratio = f"{saved['median']:.3f} ({saved['low']:.3f} to {saved['high']:.3f})"
    if frugal["label"] == fastest["label"]:
        return [row["label"], *_side(fastest), "the same", "", "", "1"]
    return [row["label"], *_side(fastest), *_side(frugal), f"**{ratio}**" if row["differs"] else ratio]


def _side(side: Mapping[str, Any]) -> list[str]:
    return [side["label"], f"{side['time_us']:,.1f} µs", f"{side['energy_mj']:,.1f} mJ, {side['power_w']:.0f} W"]
