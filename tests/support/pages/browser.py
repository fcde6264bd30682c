"""A browser that opens a page: one from disk, for which it may not use a network, or one of a server here.

Where there is none, its tests are skipped with a reason; with BLOCKTUNE_BROWSER=required they fail instead.
"""

import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TRIES = 150
STEP_MS = 100


def browser_path() -> str | None:
    """Return the browser of the distribution, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; skips the test where Playwright or the browser is missing."""
    path = browser_path()
    if path is None:
        _missing("no browser here: apt-get install chromium")
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        _missing("driving a browser needs playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


def _missing(reason: str) -> NoReturn:
    if os.environ.get("BLOCKTUNE_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


class Page:
    """A page that was opened from a file or an address, with everything that it complained about or asked for."""

    def __init__(self, browser: Any, place: Path | str, *, width: int = 1440, dark: bool = False) -> None:
        address = place if isinstance(place, str) else place.as_uri()
        self._context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            offline=address.startswith("file:"),
        )
        self.page = self._context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.problems.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.settle()

    def settle(self) -> None:
        """Wait until every view is drawn."""
        ready = (
            "BT.views.size && [...BT.views.values()].every((view) => !view.stale)"
            " && !document.querySelector('.chart[data-state=drawing]')"
        )
        for _ in range(TRIES):
            if self.page.evaluate(ready):
                return
            self.page.wait_for_timeout(STEP_MS)
        drawing = "[...document.querySelectorAll('.chart[data-state=drawing]')].map((each) => each.id)"
        raise AssertionError(f"the page did not settle: {self.page.evaluate(drawing)}, {self.problems}")

    def text(self, selector: str) -> str:
        """Return the text of an element as a reader sees it."""
        return str(self.page.locator(selector).inner_text())

    def close(self) -> None:
        self._context.close()
