"""Why a config takes its time, as a picture: what every unit takes alone, the model's total, and the measured time."""

from xml.sax.saxutils import escape

from blocktune.db.records.records import Trial
from blocktune.kernels.registry import get_kernel
from blocktune.tuner.cost.analysis import Analysis, analyse
from blocktune.tuner.cost.term_texts import terms_of
from blocktune.tuner.cost.text import binding_terms
from blocktune.tuner.lab.sweep_file import Sweep
from blocktune.tuner.occupancy.compiled_code import CompiledCode
from tools.pages.pictures.svg import svg_head, svg_text

SUFFIX = ".explain.svg"
"""How the names of pictures end: docs/**/NAME.explain.svg shows the fastest config of sweeps/NAME.sweep.json.gz."""

WIDTH, LEFT, PLOT_WIDTH = 760, 330, 400
TOP, STEP, BAR = 112, 24, 14
UNIT, MEASURED = "#2a78d6", "#eb6834"


def explain_picture(sweep: Sweep) -> str:
    """Return an SVG image of the fastest config of a sweep."""
    best = _fastest(sweep)
    code = CompiledCode.recorded(best.resources)
    assert code is not None  # of every trial with a time, by tensor cores
    kernel = get_kernel(best.config.kernel)
    found = analyse(kernel, best.config, sweep.shape, sweep.device, code, measured_us=best.time_us)
    return _draw(found, best.created_at.date().isoformat())


def _fastest(sweep: Sweep) -> Trial:
    scores = sweep.scores
    return sweep.timed[min(scores, key=lambda config: scores[config])]


def _draw(found: Analysis, day: str) -> str:
    assert found.breakdown is not None
    assert found.measured_us is not None
    named = [(words, getattr(found.breakdown, f"{name}_us")) for name, words in terms_of(found.shape).items()]
    lanes = sorted(((words, time_us) for words, time_us in named if time_us), key=lambda lane: -lane[1])
    total_us, measured_us = found.breakdown.total_us, found.measured_us
    bottom = TOP + STEP * len(lanes)
    facts = _facts(found)
    scale = PLOT_WIDTH / (1.05 * max(total_us, measured_us))
    title = f"Why {found.shape.label} takes {measured_us:,.0f} µs on {found.device.name}"
    return "\n".join(
        [
            *svg_head(WIDTH, bottom + 34 + 20 * len(facts), title),
            svg_text(24, 28, title, size=16),
            svg_text(24, 48, found.config.label, faint=True),
            svg_text(24, 66, "blue: what each unit takes alone, by the model; units overlap", faint=True),
            *(part for row, lane in enumerate(lanes) for part in _lane(row, *lane, scale)),
            *_rule(LEFT + total_us * scale, bottom, UNIT, "4 3", f"model {total_us:,.0f} µs", "end"),
            *_rule(LEFT + measured_us * scale, bottom, MEASURED, "none", f"measured {measured_us:,.0f} µs", "end", 16),
            *(svg_text(24, bottom + 34 + 20 * row, fact) for row, fact in enumerate(facts)),
            "</svg>",
            "",
        ]
    )


def _lane(row: int, words: str, time_us: float, scale: float) -> list[str]:
    """Return the bar of one unit between its name and its time."""
    y = TOP + STEP * row
    return [
        svg_text(LEFT - 10, y + 11, words.partition(":")[0], anchor="end"),
        f'<rect x="{LEFT}" y="{y}" width="{max(1.0, time_us * scale):.1f}" height="{BAR}" fill="{UNIT}"/>',
        svg_text(LEFT + time_us * scale + 6, y + 11, f"{time_us:,.0f} µs", faint=True),
    ]


def _rule(x: float, bottom: int, colour: str, dashes: str, words: str, anchor: str, lift: int = 0) -> list[str]:
    """Return a line through all lanes, under its words."""
    top = TOP - 8
    return [
        f'<path d="M{x:.1f} {top}V{bottom}" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>',
        f'<text x="{x:.1f}" y="{top - 6 - lift}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>',
    ]


def _facts(found: Analysis) -> list[str]:
    """Return what limits the config, in two sentences."""
    occupied = found.occupied
    limits = " and ".join(str(name).replace("_", " ") for name in occupied.binding)
    blocks = "block" if occupied.blocks_per_sm == 1 else "blocks"
    rate = found.flops / (found.measured_us or 0.0) / 1e6
    peak = 100 * rate / (found.device.tensor_tflops or 0.0)
    terms = terms_of(found.shape)
    binding = " and ".join(terms[name] for name in binding_terms(found))
    return [
        f"{rate:.0f} TFLOP/s, {peak:.0f} % of the tensor cores' peak. Bound by {binding}.",
        f"{occupied.blocks_per_sm} {blocks}/SM, {100 * occupied.fraction:.0f} % occupancy, limited by {limits}.",
    ]
