"""How long the first step of a program takes with each tuner, as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.pages.pictures.svg import svg_head, svg_text

SUFFIX = ".libraries.svg"
"""How the names of pictures end: docs/**/NAME.libraries.svg is drawn from results/NAME.libraries.json."""

MODELS = {"fla": "fla-core", "liger": "liger-kernel"}
STARTS = {"cold": "empty caches", "second": "second start"}
TUNERS = {"stock": ("triton.autotune", "#eb6834"), "blocktune": ("blocktune", "#2a78d6")}
WIDTH, LEFT, PLOT_WIDTH, TOP, BAR = 760, 210, 440, 82, 14

Row = tuple[str, str, float]


def start_picture(document: Mapping[str, Any]) -> str:
    """Return an SVG image of the starts of a record of libraries."""
    seconds = {(row["model"], row["start"], row["tuner"]): row["step_seconds"] for row in document["starts"]}
    groups = [
        (f"{MODELS[model]}, {STARTS[start]}", [(*TUNERS[tuner], seconds[model, start, tuner]) for tuner in TUNERS])
        for model in MODELS
        for start in STARTS
    ]
    longest = max(seconds.values())
    title = f"First training step on {document['device']}, seconds, lower is better"
    return "\n".join(
        [
            *svg_head(WIDTH, TOP + 44 * len(groups) + 12, title),
            svg_text(24, 28, title, size=16),
            svg_text(
                24, 48, f"{document['date'][:10]}; both starts of triton.autotune ran at once, a core each", faint=True
            ),
            *(part for place, (name, colour) in enumerate(TUNERS.values()) for part in _legend(place, name, colour)),
            *(part for place, group in enumerate(groups) for part in _group(TOP + 44 * place, *group, longest)),
            "</svg>",
            "",
        ]
    )


def _legend(place: int, name: str, colour: str) -> list[str]:
    x = LEFT + 150 * place
    return [
        f'<rect x="{x}" y="60" width="20" height="10" fill="{colour}"/>',
        svg_text(x + 26, 69, name),
    ]


def _group(y: int, name: str, rows: Sequence[Row], longest: float) -> list[str]:
    """Return the bars of one start, each with its seconds."""
    parts = [svg_text(LEFT - 10, y + 19, name, anchor="end")]
    for place, (_, colour, seconds) in enumerate(rows):
        top, width = y + place * (BAR + 2), PLOT_WIDTH * seconds / longest
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(svg_text(LEFT + width + 6, top + 11, f"{seconds:.1f} s", faint=True))
    return parts
