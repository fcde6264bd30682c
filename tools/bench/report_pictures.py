"""Draws the pictures of docs/guide: `python -m tools.bench.report_pictures`, or `make pictures`.

They are of the report of results/ and of the live page of a search that is made of it: every view as on a desk and as
on a phone. It needs a browser and playwright.
"""

import base64
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktune.db.store import ResultStore
from tests.cli.ui.conftest import recorded
from tests.support.pages.browser import Page, chromium
from tests.support.stores.live_servers import live_server
from tools import RECORDS, ROOT, SHIPPED

FOLDER = ROOT / "docs" / "guide" / "pictures"
VIEWS = ("occupancy", "sweeps", "times", "search", "shapes")
SLOW = "#heat-0 [aria-label*='config: flash_fwd_hopper 256x128 w4 s4']"
WIDTHS = {1440: False, 390: True}
"""Of the windows in pixels, and whether it is a dark one."""

SEARCHED = 300
"""Trials of the search that the live page shows."""

QUALITY = 0.66
COMPILE_MS = 120_000

_TO_WEBP = """async ([png, quality]) => {
  const image = new Image();
  image.src = png;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL("image/webp", quality);
}"""


def main() -> None:
    """Write the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        report = Path(name) / "report.html"
        command = (
            sys.executable,
            "-P",
            "-m",
            "blocktune",
            "report",
            *map(str, (RECORDS, SHIPPED)),
            "--out",
            str(report),
        )
        subprocess.run(command, check=True)
        for width, dark in WIDTHS.items():
            _draw_report(browser, report, width, dark)
        for width, dark in WIDTHS.items():
            db = Path(name) / f"search-{width}.db"
            _record_search(db)
            with live_server(db) as server:
                _draw_live(browser, server.url, width, dark)


def _record_search(db: Path) -> None:
    """Fill a store with the trials of a search that still runs."""
    now = datetime.now(UTC)
    with ResultStore.open(db) as store:
        store.put_all([replace(trial, created_at=now) for trial in recorded()[:SEARCHED]], [])


def _draw_report(browser: Any, report: Path, width: int, dark: bool) -> None:
    """Draw every view of the report, a slow tile compared to another one."""
    opened = Page(browser, report, width=width, dark=dark)
    opened.page.locator(SLOW).first.click(force=True)
    opened.settle()
    _release_header(opened)
    for view in VIEWS:
        _save(browser, opened.page.locator(f"#{view}").screenshot(), f"report-{view}-{width}")
    opened.close()


def _draw_live(browser: Any, url: str, width: int, dark: bool) -> None:
    """Draw the beginning of the live page, and a config that was compiled on request."""
    opened = Page(browser, url, width=width, dark=dark)
    _release_header(opened)
    clip = {"x": 0, "y": 0, "width": width, "height": 1000}
    _save(browser, opened.page.screenshot(full_page=True, clip=clip), f"live-{width}")
    opened.page.locator("#what-if-kernel").select_option("flash_fwd")
    opened.page.locator("#what-if-block_m").fill("256")
    opened.page.locator("#what-if-form button").click()
    opened.page.locator("#what-if-jobs [data-state=done]").wait_for(timeout=COMPILE_MS)
    opened.settle()
    _release_header(opened)
    clip = opened.page.locator("#what-if").bounding_box()
    _save(browser, opened.page.screenshot(full_page=True, clip=clip), f"what-if-{width}")
    opened.close()


def _release_header(opened: Page) -> None:
    """Let what keeps its place in the window scroll away, which would else lie on the pictures."""
    static = "for (const each of document.querySelectorAll('header, .picked')) each.style.position = 'static'"
    opened.page.evaluate(f"{static}; window.scrollTo(0, 0)")
    opened.page.wait_for_timeout(1000)  # it scrolls smoothly


def _save(browser: Any, png: bytes, name: str) -> None:
    """Write a picture as WebP, which the browser makes of a PNG at a third of its size."""
    page = browser.new_page()
    address = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    found = page.evaluate(_TO_WEBP, [address, QUALITY])
    (FOLDER / f"{name}.webp").write_bytes(base64.b64decode(found.partition(",")[2]))
    page.close()


if __name__ == "__main__":
    main()
