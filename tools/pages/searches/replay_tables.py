"""The tables of a replay's document."""

from collections.abc import Mapping, Sequence
from typing import Any

from blocktune.cli.lab.replay_file import (
    MODEL_COLUMNS,
    RACING_COLUMNS,
    STRATEGY_COLUMNS,
    model_cells,
    racing_cells,
    strategy_cells,
)
from blocktune.kernels.values.errors import UsageError
from tools.pages.document_tables import markdown_table
from tools.pages.searches.model_fit import FASTEST, FitRow
from tools.pages.searches.sweep_sources import SweepSources

FIT = "fit"


FIT_COLUMNS = ("family", "kernel", "sweeps", "measured / predicted", "single configs")


def replay_tables(
    document: Mapping[str, Any],
    part: str | None = None,
    sources: SweepSources | None = None,
    fit: Sequence[FitRow] = (),
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


def sources_text(sources: SweepSources) -> str:
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


def fit_table(rows: Sequence[FitRow]) -> str:
    """Return measured over predicted times, by family and kernel; nothing without rows."""
    if not rows:
        return ""
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
