"""The file of `tune lab replay --out`, and its rows in tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.json_files import read_document
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    pass

SUFFIX = ".replay.json"
"""How the names of such files in results/ end."""

FORMAT, SCHEMA = "blocktune-replay", 1

COUNTS = ("5", "10", "20", "40", "80")
STRATEGY_COLUMNS = (
    "strategy",
    "seeds",
    *(f"after {count}" for count in COUNTS),
    "95th percentile at 20",
    "seconds for 20",
    "seconds to 1 %",
)
MODEL_COLUMNS = ("model alone", "shapes", "rank correlation", "first choice", "best of 8", "shared memory off by",
                 "registers off by")  # fmt: skip


RACING_COLUMNS = ("stopped when slower by", "rounds saved", "stopped of those within 2 %")


def read_replay(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it holds no comparison of searches of this schema.
    """
    return read_document(path, "replay", FORMAT, SCHEMA)


def join_replay(report: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the report with the strategies that a file holds besides, so that a long replay may be made in parts.

    Raises:
        UsageError: the file holds something else, or searches of other sweeps.
    """
    if not path.exists():
        return dict(report)
    kept = read_replay(path)
    if kept["sweeps"] != report["sweeps"]:
        raise UsageError(
            f"{path} holds searches of other sweeps, so these cannot be added to it. Name another file, or remove it."
        )
    strategies = {**kept["strategies"], **report["strategies"]}
    alike = _random_rows(strategies, report["default"], report["measurements"].index(20))
    return {**report, "strategies": strategies, "random_as_good": alike}


def _random_rows(strategies: Mapping[str, Any], default: str, after: int) -> list[str]:
    """Return the shapes of which a random search knows as good a config as the default one; none where one of the two
    is missing.

    Args:
        strategies: rows by name.
        default: the default strategy.
        after: the place of the number of measurements among those of a row.
    """
    from blocktune.tuner.lab.replay_report import AS_GOOD

    if not {default, "random"} <= strategies.keys():
        return []
    usual, random = (strategies[name]["shapes"] for name in (default, "random"))
    return [label for label, regrets in random.items() if regrets[after] - usual[label][after] <= AS_GOOD]


def strategy_cells(name: str, row: Mapping[str, Any]) -> list[str]:
    regret = row["regret"]
    means = [
        f"{_percent(found['mean'])} ({_percent(found['low'])} to {_percent(found['high'])})"
        for found in (regret[count] for count in COUNTS)
    ]
    near = row.get("seconds_to_near")
    seconds = f"{row['seconds']['20']:.1f}", "" if near is None else f"{near:.1f}"
    return [name, str(row["seeds"]), *means, _percent(regret["20"]["p95"]), *seconds]


def model_cells(row: Mapping[str, Any]) -> list[str]:
    first, best, ranks = row["first_choice"], row["best_of_8"], row["rank_correlation"]
    return [
        f"{row['kind']}, {row['kernel'] or 'all kernels'}",
        str(row["sweeps"]),
        f"{ranks['median']:.2f} ({ranks['low']:.2f})",
        f"{_percent(first['median'])} ({_percent(first['high'])})",
        f"{_percent(best['median'])} ({_percent(best['high'])})",
        f"{row['shared_error_bytes']['median']:,.0f} B ({row['shared_error_bytes']['high']:,.0f} B)",
        f"{row['register_error']['median']:.0f} ({row['register_error']['high']:.0f})",
    ]


def racing_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row.get("pruner") or f"{100 * (row['margin'] - 1):.0f} %",
        f"{100 * row['rounds_saved']:.0f} %",
        f"{row['stopped_close']} of {row['close']}",
    ]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
