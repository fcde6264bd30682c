"""What `tune noise --out` and `tune rematch --out` keep, and the tables that are made of it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blocktune.cli.shared.json_files import read_document

NOISE, REMATCH = ".noise.json", ".rematch.json"
SUFFIXES = (NOISE, REMATCH)
"""How the names of such files in results/ end."""

NOISE_FORMAT, REMATCH_FORMAT, SCHEMA = "blocktune-noise", "blocktune-rematch", 1
_FORMATS = {NOISE: NOISE_FORMAT, REMATCH: REMATCH_FORMAT}

NO_NOISE = (
    "No study of the noise is here yet: `tune noise --out results/DEVICE.noise.json` makes it, `make results` shows it."
)
NO_REMATCH = (
    "No winners of repeated searches have met yet: `tune rematch --out results/DEVICE.rematch.json` lets them, "
    "`make results` shows it."
)
NOISE_COLUMNS = ("regime", "candidate: time", "ratio to the anchor", "finals: time", "ratio", "drift of times, ratios",
                 "equal configs: a winner", "apart", "SM clock in finals", "power", "temperature")  # fmt: skip
REMATCH_COLUMNS = ("shape", "regime", "same winner or tied", "different winners", "slowest / fastest winner",
                   "slower than the default")  # fmt: skip


def block(path: Path) -> str:
    """The tables of a file, or how it would come about.

    Raises:
        UsageError: it holds nothing of the kind that its name says.
    """
    noise = path.name.endswith(NOISE)
    if not path.exists():
        return NO_NOISE if noise else NO_REMATCH
    document = read_document(path, "results", _FORMATS[NOISE if noise else REMATCH], SCHEMA)
    return noise_table(document) if noise else rematch_table(document)


def noise_table(document: Mapping[str, Any]) -> str:
    """What a study found: one row a regime."""
    environment = document["environment"]
    software = ", ".join(f"{name} {environment[name]}" for name in ("triton", "torch", "driver"))
    rows = [noise_cells(name, row) for name, row in document["summary"]["regimes"].items()]
    caption = (
        f"{document['shape']['label']} on {document['device']} on {document['created_at'][:10]} ({software}, power "
        f"limit {environment['power_limit_w']} W, protocol {environment['protocol']}), {document['seconds']:.0f} s of "
        "one config and others near it, the regimes by turns; all values over the median of their own config and "
        "regime, 5th to 95th percentile:"
    )
    return "\n\n".join((caption, _table(NOISE_COLUMNS, rows), *noise_notes(document)))


def noise_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    candidates, finals, duels = row["candidates"], row["finals"], row["duels"]
    drift = row["drift"]
    state = row["state"]["finals"]
    return [
        name,
        f"{_spread(candidates['time'])} ({candidates['count']})",
        _spread(candidates["ratio"]),
        f"{_spread(finals['time'])} ({finals['count']})",
        _spread(finals["ratio"]),
        "-" if drift is None else f"{_signed(drift['time'])}, {_signed(drift['ratio'])}",
        f"{duels['won']} of {duels['count']}",
        "-" if duels["distance"] is None else f"{100 * duels['distance']:.2f} %",
        _range(state["sm_clock_mhz"], "MHz"),
        _range(state["power_w"], "W"),
        _range(state["temperature_c"], "°C"),
    ]


def noise_notes(document: Mapping[str, Any]) -> list[str]:
    """What there is to say beside the table."""
    summary, labels = document["summary"], [config["label"] for config in document["configs"]]
    lines = [
        f"Final times under `{name}`, over that of {labels[0]}: "
        + ", ".join(f"{labels[int(place)]} {ratio:.3f}" for place, ratio in order)
        + "."
        for name, order in summary["order"].items()
    ]
    swapped = [f"{labels[a]} and {labels[b]}" for a, b in summary["swapped"]]
    lines.append(f"Ordered differently by more than the tie band: {'; '.join(swapped) if swapped else 'none'}.")
    if summary["tie_band"] is not None:
        lines.append(
            f"In 95 % of finals a config is within {100 * summary['tie_band']:.2f} % of itself; the tie band is "
            f"{100 * summary['tie_band_used']:.1f} %."
        )
    return lines


def rematch_table(document: Mapping[str, Any]) -> str:
    """What became of the winners of repeated searches: one row a shape."""
    caption = (
        f"Winners of searches that began with nothing, on {document['device']} on {document['created_at'][:10]}, timed "
        "against each other and the default afterwards, in one run of finals a shape:"
    )
    return f"{caption}\n\n{_table(REMATCH_COLUMNS, [rematch_cells(row) for row in document['rows']])}"


def rematch_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["label"],
        row["regime"],
        f"{row['agreeing']} of {row['searches']}",
        str(len(row["winners"])),
        f"{row['slowest']:.3f}",
        f"{row['slower_than_default']} of {row['searches']}",
    ]


def _spread(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{_signed(found['low'])} to {_signed(found['high'])}"


def _signed(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _range(values: list[float] | None, unit: str) -> str:
    if values is None:
        return "-"
    low, _, high = values
    return f"{low:.0f} {unit}" if round(low) == round(high) else f"{low:.0f} to {high:.0f} {unit}"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(columns)
    return "\n".join(_line(cells) for cells in (names, ["---"] + ["---:"] * (len(names) - 1), *rows))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
