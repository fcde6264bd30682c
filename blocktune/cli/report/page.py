"""The page of a report: text, style, scripts, charts and data in one file that asks for nothing from a network.

Data is JSON in gzip in base64, which no browser takes for markup. Every string of it went through the one door for
foreign text, and the scripts set it as text, never as HTML. A content security policy names the page's own scripts by
their hashes and lets nothing else run or load.
"""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from blocktune.cli.report.drawing import javascript_bundle
from blocktune.kernels.files.foreign_text import shown
from blocktune.kernels.files.reading import package_text
from blocktune.kernels.values.errors import UsageError

ASSETS = "blocktune.cli.report"
SCRIPTS = (
    "state.js",
    "occupancy.js",
    "elements.js",
    "charts.js",
    "explorer.js",
    "multiprocessor.js",
    "heat_maps.js",
    "config_details.js",
    "times.js",
    "counters.js",
    "search.js",
    "shapes.js",
    "runs.js",
    "start.js",
)
"""In the order in which they run, after Vega."""


def page(data: Mapping[str, Any], sweeps: Sequence[Mapping[str, Any]], title: str, name: str) -> str:
    """Return the HTML text.

    Args:
        data: what every view needs at once.
        sweeps: unpacked by the page when they are chosen.
        title: of the page.
        name: what the page calls itself.
    """
    scripts = [vega(), "\n".join(asset(name) for name in SCRIPTS)]
    packed = [_data_block("data", data), *(_data_block(f"sweep-{index}", sweep) for index, sweep in enumerate(sweeps))]
    parts = {
        "TITLE": escape(shown(title)),
        "NAME": escape(name),
        "POLICY": _policy(scripts),
        "STYLE": f"<style>\n{asset('report.css')}\n</style>",
        "DATA": "\n".join(packed),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return fill_page(parts)


def fill_page(parts: Mapping[str, str]) -> str:
    """Return the text of the page with its parts: TITLE, NAME, POLICY, STYLE, DATA and SCRIPTS."""
    text = asset("report.html")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part, 1)
    return text


def asset(name: str) -> str:
    """Return the text of a file that is part of the page."""
    return package_text(ASSETS, "assets", name)


def door(value: Any) -> Any:
    """Return plain values with every string as people may see it."""
    match value:
        case str():
            return shown(value)
        case dict():
            return {shown(str(name)): door(entry) for name, entry in value.items()}
        case list() | tuple():
            return [door(entry) for entry in value]
        case _:
            return value


def json_text(value: Any) -> str:
    """Return plain values as JSON, with every string as people may see it.

    Raises:
        UsageError: a number is not finite, which JSON cannot say.
    """
    try:
        return json.dumps(door(value), separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise UsageError(
            f"A file of the report holds numbers that are not finite: {error}. Write that file again, or leave it out."
        ) from error


def _data_block(name: str, value: Any) -> str:
    """Return a block of data; raises what `json_text` raises."""
    text = json_text(value)
    code = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{code}</script>'


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


@functools.cache
def vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that sets them on `window`.

    Raises:
        UsageError: vl-convert cannot run here.
    """
    return javascript_bundle().replace("</script", "<\\/script")
