"""What `tune lab replay --out` keeps, and the tables that are made of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktune.cli.output.document_tables import markdown_table
from blocktune.cli.output.json_files import read_document
from blocktune.kernels.values.errors import UsageError

if TYPE_CHECKING:
    from blocktune.tuner.lab.model_fit import FitRow
    from blocktune.tuner.lab.sweep_sources import SweepSources

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

FIT = "fit"
FIT_COLUMNS = ("family", "kernel", "sweeps", "measured / predicted", "single configs")

RACING_COLUMNS = ("stopped when slower by", "rounds saved", "stopped of those within 2 %")


def read_replay(path: Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        UsageError: it holds no comparison of searches of this schema.
    """
    return read_document(path, "replay", FORMAT, SCHEMA)


def joined(report: Mapping[str, Any], path: Path) -> dict[str, Any]:
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
    alike = _random_as_good(strategies, report["default"], report["measurements"].index(20))
    return {**report, "strategies": strategies, "random_as_good": alike}


def _random_as_good(strategies: Mapping[str, Any], default: str, after: int) -> list[str]:
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


def replay_tables(
    document: Mapping[str, Any],
    part: str | None = None,
    sources: "SweepSources | None" = None,
    fit: "Sequence[FitRow]" = (),
) -> str:
    """Return the tables of a document, or one part of them.

    Args:
        document: as `tune lab replay --out` writes it.
        part: `strategies`, `model`, `fit` or `racing`.
        sources: what the sweeps are of; stands above the tables.
        fit: how far today's model is from the times of the sweeps; without rows there is no such table.

    Raises:
        UsageError: there is no such part.
    """
    parts = {
        "strategies": _strategies,
        "model": _model,
        FIT: lambda _: fit_table(fit),
        "racing": _racing,
    }
    if part is not None and part not in parts:
        raise UsageError(f"A replay has no part {part!r}. The parts are {', '.join(parts)}; name one, or none for all.")
    told = "" if sources is None else sources_text(sources)
    tables = [make(document) for name, make in parts.items() if part in (None, name)]
    return "\n\n".join(text for text in (told, *tables) if text)


def sources_text(sources: "SweepSources") -> str:
    """Return which part of the sweeps is of older kernels, and which kernels they lack; nothing where neither is."""
    parts = []
    if sources.older:
        count, names = sum(sources.older.values()), ", ".join(sources.older)
        parts.append(f"{count} of the recorded configs are of older sources of their kernels ({names}).")
    if sources.missing:
        lacking = ", ".join(f"`{name}` in {count}" for name, count in sources.missing.items())
        parts.append(f"Kernels that compete today and are not in all sweeps of their shapes: {lacking}.")
    return f"Until the sweeps are recorded again: {' '.join(parts)}" if parts else ""


def _strategies(document: Mapping[str, Any]) -> str:
    """Return how far from the best every strategy ends, the best of them first, and where random configs are as
    good."""
    best_first = sorted(document["strategies"].items(), key=lambda entry: entry[1]["regret"]["20"]["mean"])
    shapes, alike = len(document["sweeps"]), document["random_as_good"]
    configs = sum(sweep["configs"] for sweep in document["sweeps"])
    without = f", without {' and '.join(left_out)}" if (left_out := document.get("without")) else ""
    caption = (
        f"Searches of {shapes} recorded sweeps ({configs} configs, {', '.join(document['devices'])}{without}): "
        "each `after N` column shows how much slower the best of N measurements is than the best of the sweep, as mean "
        f"and 95 % confidence interval over the shapes. `tune run` uses `{document['default']}`. "
        "Seconds are those of compiling and measuring, as recorded; the last column is the median after which the best "
        "so far is within 1 % of the sweep's best."
    )
    where = f"Random configs are as good (within 0.5 %) after 20 measurements on {len(alike)} of {shapes} shapes"
    table = markdown_table(STRATEGY_COLUMNS, [strategy_cells(name, row) for name, row in best_first])
    return "\n\n".join((caption, table, where + (f": {', '.join(alike)}." if alike else ".")))


def _model(document: Mapping[str, Any]) -> str:
    caption = (
        f"The model alone, with nothing measured, on the sweeps of {', '.join(document['devices'])} (medians over the "
        "shapes, in brackets the worst). Of other devices nothing is claimed:"
    )
    return f"{caption}\n\n{markdown_table(MODEL_COLUMNS, [model_cells(row) for row in document['model']])}"


def fit_table(rows: "Sequence[FitRow]") -> str:
    """Return measured over predicted times, by family and kernel; nothing without rows."""
    if not rows:
        return ""
    from blocktune.tuner.lab.model_fit import FASTEST

    caption = (
        f"Measured over predicted time, by today's model, of the {FASTEST} fastest configs of each kernel and sweep: "
        "1 is exact, more is slower than predicted. The rank correlations above are as the replay recorded them, with "
        "the model of its day."
    )
    cells = [
        [row.family, f"`{row.kernel}`", str(row.sweeps), f"{row.median:.2f}", f"{row.low:.2f} to {row.high:.2f}"]
        for row in rows
    ]
    return f"{caption}\n\n{markdown_table(FIT_COLUMNS, cells)}"


def _racing(document: Mapping[str, Any]) -> str:
    caption = "A race, in which a config gets no more than two rounds if these are so much slower than the best:"
    return f"{caption}\n\n{markdown_table(RACING_COLUMNS, [racing_cells(row) for row in document['racing']])}"


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
