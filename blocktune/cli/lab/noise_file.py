"""The files of `tune lab noise --out` and `tune lab rematch --out`, and how their rows are shown."""

from collections.abc import Mapping
from typing import Any

NOISE_FORMAT, REMATCH_FORMAT, SCHEMA = "blocktune-noise", "blocktune-rematch", 1
"""tuner/lab/noise_document.py writes the first."""

NOISE_COLUMNS = ("regime", "candidate: time", "ratio to the anchor", "finals: time", "ratio", "drift of times, ratios",
                 "equal configs: a winner", "apart", "SM clock in finals", "power", "temperature")  # fmt: skip
REMATCH_COLUMNS = ("shape", "regime", "same winner or tied", "different winners", "slowest / fastest winner",
                   "slower than the default")  # fmt: skip


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
        "-" if drift is None else f"{_signed_percent(drift['time'])}, {_signed_percent(drift['ratio'])}",
        f"{duels['won']} of {duels['count']}",
        "-" if duels["distance"] is None else f"{100 * duels['distance']:.2f} %",
        _range(state["sm_clock_mhz"], "MHz"),
        _range(state["power_w"], "W"),
        _range(state["temperature_c"], "°C"),
    ]


def noise_notes(document: Mapping[str, Any]) -> list[str]:
    """Return the lines that accompany the table."""
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
    return "-" if found is None else f"{_signed_percent(found['low'])} to {_signed_percent(found['high'])}"


def _signed_percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _range(values: list[float] | None, unit: str) -> str:
    if values is None:
        return "-"
    low, _, high = values
    return f"{low:.0f} {unit}" if round(low) == round(high) else f"{low:.0f} to {high:.0f} {unit}"
