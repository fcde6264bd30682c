"""A recorded sweep as heat maps in a terminal: TFLOP/s of every tile, a map for each kernel, warps and stages."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from blocktune.cli.output.tables import wrapped_lines
from blocktune.kernels.files.foreign_text import shown
from blocktune.tuner.report.empty_cells import Place, place_of

if TYPE_CHECKING:
    from blocktune.db.records.records import Trial
    from blocktune.tuner.lab.sweep_file import Sweep

CELL = 5
"""Columns of a cell: three digits, a mark and a blank."""

GAP = 3
"""Columns between two maps."""

SPILLED, FAILED, UNTRIED = "*", "x", "."

COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Of the least to the most: the scale viridis, which colour-blind readers and greyscale keep in order."""

LEGEND = (
    f"TFLOP/s of the fastest variant of each tile, block_m by block_n, with w warps and s stages; {SPILLED} spills "
    f"registers, {FAILED} has no time, {UNTRIED} cannot exist or was not tried"
)


@dataclass(frozen=True, slots=True)
class Map:
    """The tiles of one kernel with some warps and stages.

    rates: TFLOP/s by block_m and block_n, None without a time.
    """

    title: str
    rates: Mapping[tuple[int, int], float | None]
    spilled: frozenset[tuple[int, int]]

    @property
    def rows(self) -> list[int]:
        return sorted({m for m, _ in self.rates}, reverse=True)

    @property
    def columns(self) -> list[int]:
        return sorted({n for _, n in self.rates})

    @property
    def width(self) -> int:
        return CELL * (1 + len(self.columns))


def sweep_lines(sweep: "Sweep", width: int) -> Iterator[Text]:
    """Yield the lines of a sweep's heat maps, as many maps next to each other as the width has room for."""
    scores = sweep.scores
    ranked = sorted(sweep.trials, key=lambda trial: scores.get(trial.config, math.inf))
    yield from _words(
        f"{sweep.label} on {sweep.device.name}: {len(scores)} of {len(ranked)} configs have a time", width
    )
    if ranked[0].time_us:
        facts = f"{ranked[0].time_us:,.1f} µs, {_rate(sweep, ranked[0]):.0f} TFLOP/s"
        yield from _words(f"best: {ranked[0].config.label}, {facts}", width)
    yield from _words(LEGEND, width)
    rates = [rate for trial in ranked if (rate := _rate(sweep, trial)) is not None]
    low, high = min(rates, default=0.0), max(rates, default=1.0)
    for name, maps in _maps(sweep, ranked).items():
        yield Text("")
        yield Text(name, style="bold")
        for group in _rows_of_maps(maps, width):
            yield from _side_by_side(group, low, high)


def sweep_json(sweep: "Sweep") -> dict[str, Any]:
    """Return the fastest config of every tile as plain values, the fastest tile first."""
    scores = sweep.scores
    ranked = sorted(sweep.timed.values(), key=lambda trial: scores[trial.config])
    tiles: dict[Place, Trial] = {}
    for trial in ranked:
        tiles.setdefault(place_of(trial.config), trial)
    return {
        "device": sweep.device.name,
        "shape": sweep.shape.to_json() | {"label": sweep.shape.label},
        "configs": len(sweep.trials),
        "timed": len(ranked),
        "tiles": [
            {"config": trial.config.to_json(), "time_us": trial.time_us, "tflops": _rate(sweep, trial)}
            for trial in tiles.values()
        ],
    }


def _words(text: str, width: int) -> Iterator[Text]:
    return map(Text, wrapped_lines(shown(text), width, indent=2))


def _rate(sweep: "Sweep", trial: "Trial") -> float | None:
    return sweep.shape.flops / trial.time_us / 1e6 if trial.time_us else None


def _maps(sweep: "Sweep", ranked: Iterable["Trial"]) -> dict[str, list[Map]]:
    """Return by kernel, the one with the fastest config first."""
    fastest: dict[Place, Trial] = {}
    for trial in ranked:
        fastest.setdefault(place_of(trial.config), trial)
    found: dict[str, list[Map]] = {kernel: [] for kernel, *_ in fastest}
    for kernel, warps, stages in sorted({(kernel, w, s) for kernel, _, _, w, s in fastest}):
        own = {
            (m, n): trial for (name, m, n, w, s), trial in fastest.items() if (name, w, s) == (kernel, warps, stages)
        }
        rates = {tile: _rate(sweep, trial) for tile, trial in own.items()}
        spilled = frozenset(tile for tile, trial in own.items() if _spills(trial))
        found[kernel].append(Map(f"w{warps} s{stages}", rates, spilled))
    return found


def _spills(trial: "Trial") -> bool:
    return trial.resources is not None and trial.resources.spill_bytes > 0


def _rows_of_maps(maps: Iterable[Map], width: int) -> Iterator[list[Map]]:
    """Yield the maps that fit next to each other."""
    group: list[Map] = []
    for each in maps:
        if group and sum(one.width + GAP for one in group) + each.width > width:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _side_by_side(group: Sequence[Map], low: float, high: float) -> Iterator[Text]:
    heights = max(len(each.rows) for each in group)
    yield _join_parts([Text(each.title.ljust(each.width)) for each in group])
    yield _join_parts([Text("".join(f"{n:>{CELL}}" for n in ("", *each.columns))) for each in group])
    for line in range(heights):
        yield _join_parts([_map_line(each, line, low, high) for each in group])


def _join_parts(parts: Iterable[Text]) -> Text:
    return Text(" " * GAP).join(parts)


def _map_line(each: Map, line: int, low: float, high: float) -> Text:
    if line >= len(each.rows):
        return Text(" " * each.width)
    row = each.rows[line]
    text = Text(f"{row:>{CELL}}")
    for column in each.columns:
        text.append_text(_cell(each, (row, column), low, high))
    return text


def _cell(each: Map, tile: tuple[int, int], low: float, high: float) -> Text:
    if tile not in each.rates:
        return Text(UNTRIED.rjust(CELL - 1) + " ")
    rate = each.rates[tile]
    if rate is None:
        return Text(FAILED.rjust(CELL - 1) + " ")
    mark = SPILLED if tile in each.spilled else " "
    return Text(f"{rate:>{CELL - 1}.0f}{mark}", style=_style((rate - low) / ((high - low) or 1.0)))


def _style(place: float) -> str:
    """Return black or white ink on the colour at a place from 0 to 1."""
    spot = place * (len(COLOURS) - 1)
    left = min(int(spot), len(COLOURS) - 2)
    mixed = [
        round(a + (b - a) * (spot - left)) for a, b in zip(COLOURS[left], COLOURS[left + 1], strict=True)
    ]  # fmt: skip
    return f"{'black' if place > 0.55 else 'white'} on rgb({','.join(map(str, mixed))})"
