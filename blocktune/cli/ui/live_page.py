"""The files of the live page: the report's own, served one by one, and a few scripts that keep them up to date."""

import functools
import threading

from blocktune.cli.report.page import SCRIPTS as REPORT_SCRIPTS
from blocktune.cli.report.page import asset, fill_page, vega
from blocktune.cli.ui.guard import POLICY
from blocktune.kernels.files.reading import package_text

SCRIPTS = ("live.js", "shape_form.js", "what_if.js")
"""In the order in which they run: after the report's views, before its last script, which starts the page."""

FILES = {
    "vega.js": "text/javascript",
    "page.js": "text/javascript",
    "page.css": "text/css",
}
"""What the page loads, with its type."""


def live_page() -> str:
    """Return the HTML text."""
    return fill_page(
        {
            "TITLE": "blocktune live",
            "NAME": "blocktune live",
            "POLICY": POLICY.split("; frame-ancestors")[0],  # which a page cannot say of itself
            "STYLE": '<link rel="stylesheet" href="page.css">',
            "DATA": "",
            "SCRIPTS": '<script src="vega.js"></script>\n<script src="page.js"></script>',
        }
    )


_making = threading.Lock()


def file_text(name: str) -> str:
    """Return the text of one of `FILES`; whoever asks while it is made waits, since that takes a second."""
    with _making:
        return _file_text(name)


@functools.cache
def _file_text(name: str) -> str:
    match name:
        case "vega.js":
            return vega()
        case "page.css":
            return f"{asset('report.css')}\n{_own('live.css')}"
        case _:
            *views, start = map(asset, REPORT_SCRIPTS)
            return "\n".join([*views, *map(_own, SCRIPTS), start])


def _own(name: str) -> str:
    return package_text("blocktune.cli.ui", "assets", name)
