"""A bench as a picture: TFLOP/s over the length of the sequence, a panel for each head dimension and mask."""

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

from blocktune.kernels.values.shape import Causal
from tools.pages.bench_tables import GUESTS, MASKS, REGIMES, BenchRow
from tools.pages.pictures.svg import svg_head, svg_text

SUFFIX = ".bench.svg"
"""How the names of pictures end: docs/**/NAME.bench.svg is drawn from results/NAME.bench.json."""

LINES = {
    "fa2": ("FA2 in PyTorch", "#898781", 2.0),
    "fa4": (GUESTS["fa4"], "#2f9e6e", 2.0),
    "fa3": (GUESTS["fa3"], "#9a5fc4", 2.0),
    "cudnn": ("cuDNN", "#eb6834", 2.0),
    "tuned": ("blocktune, tuned", "#2a78d6", 3.0),
}
"""Of each contender its name, colour and width, the one drawn last on top. Who was not timed has no line."""

WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 760, 300, 150
LEFT, TOP, GAP_X, GAP_Y = 56, 110, 64, 62
STEP = 200
"""TFLOP/s between two lines of the grid."""

Panel = tuple[int, Causal]
Line = tuple[str, str, float]


def speed_picture(document: Mapping[str, Any]) -> str:
    """Return an SVG image of a bench, as `tune bench --out` writes it."""
    rows = [BenchRow(row) for row in document["rows"]]
    panels = sorted({(row.shape.head_dim, row.shape.causal) for row in rows}, key=_place)
    lines = {name: line for name, line in LINES.items() if any(row.timing(name) for row in rows)}
    highest = STEP * (1 + int(max(_rate(row, name) or 0 for row in rows for name in lines) // STEP))
    height = TOP + (PANEL_HEIGHT + GAP_Y) * -(-len(panels) // 2)
    title = f"Attention forward on {document['device']['name']}, {rows[0].shape.dtype}: TFLOP/s, higher is better"
    when = f"{document['created_at'][:10]}, {REGIMES[document['regime']]}"
    parts = [
        *svg_head(WIDTH, height, title),
        svg_text(LEFT, 28, title, size=16),
        svg_text(LEFT, 46, f"{when}, over the sequence length", faint=True),
        *_legend(lines),
    ]
    for index, panel in enumerate(panels):
        own = sorted((row for row in rows if (row.shape.head_dim, row.shape.causal) == panel), key=BenchRow.place)
        x = LEFT + (index % 2) * (PANEL_WIDTH + GAP_X)
        y = TOP + (index // 2) * (PANEL_HEIGHT + GAP_Y)
        parts += _panel(panel, own, lines, x, y, highest)
    return "\n".join([*parts, "</svg>", ""])


def _place(panel: Panel) -> tuple[int, int]:
    return panel[0], list(Causal).index(panel[1])


def _rate(row: BenchRow, name: str) -> float | None:
    """Return TFLOP/s of a contender; None where it was not timed."""
    timing = row.timing(name)
    return None if timing is None else float(timing["tflops"])


def _legend(lines: Mapping[str, Line]) -> list[str]:
    parts, x = [], LEFT
    for name, colour, width in reversed(list(lines.values())):
        parts.append(f'<path d="M{x} 64h20" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(svg_text(x + 26, 68, name))
        x += 26 + 7 * len(name) + 24
    return parts


def _panel(
    panel: Panel, rows: Sequence[BenchRow], lines: Mapping[str, Line], x: int, y: int, highest: int
) -> list[str]:
    """Return the elements of one panel whose plot has its upper left corner at x, y."""
    lengths = sorted({row.shape.seqlen_q for row in rows})
    span = max(log2(lengths[-1] / lengths[0]), 1.0)

    def across(length: int) -> float:
        return x + PANEL_WIDTH * log2(length / lengths[0]) / span

    def down(rate: float) -> float:
        return y + PANEL_HEIGHT * (1 - rate / highest)

    parts = [svg_text(x, y - 8, f"head_dim {panel[0]}, {MASKS[panel[1]]}")]
    for mark in range(0, highest + 1, STEP):
        parts.append(f'<path d="M{x} {down(mark):.1f}h{PANEL_WIDTH}" class="grid"/>')
        parts.append(svg_text(x - 8, down(mark) + 4, str(mark), faint=True, anchor="end"))
    parts += [
        svg_text(across(length), y + PANEL_HEIGHT + 18, str(length), faint=True, anchor="middle") for length in lengths
    ]
    for name, (_, colour, width) in lines.items():
        rates = [(row.shape.seqlen_q, rate) for row in rows if (rate := _rate(row, name)) is not None]
        points = " ".join(f"{across(length):.1f},{down(rate):.1f}" for length, rate in rates)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    return parts
