"""Draws the pictures of docs/guide/report.md: `python -m tests.support.programs.report_pictures REPORT`.

REPORT is a file that `tune report results --out REPORT` wrote. It needs a browser and playwright.
"""

import sys
from pathlib import Path
from typing import Any

from tests.support.browser import Page, chromium

FOLDER = Path(__file__).parents[3] / "docs" / "guide"
SLOW = "#heat-0 [aria-label*='config: flash_fwd_hopper 256x128 w4 s4']"


def main() -> None:
    """Write one picture as on a desk and one as on a phone."""
    report = Path(sys.argv[1]).resolve()
    with chromium() as browser:
        _desk(browser, report)
        _phone(browser, report)


def _desk(browser: Any, report: Path) -> None:
    """The heat maps, with a slow tile compared to the best one."""
    opened = Page(browser, report, width=1280)
    opened.page.locator(SLOW).first.click(force=True)
    opened.settle()
    _cut(opened, "#sweeps", FOLDER / "report_sweep.png", height=1130)


def _phone(browser: Any, report: Path) -> None:
    """The occupancy explorer."""
    _cut(Page(browser, report, width=390), "#occupancy", FOLDER / "report_phone.png", height=1130)


def _cut(opened: Page, selector: str, path: Path, *, height: int) -> None:
    """Save the upper part of a view."""
    opened.page.evaluate("document.querySelector('header').style.position = 'static'; window.scrollTo(0, 0)")
    opened.page.wait_for_timeout(1000)  # it scrolls smoothly
    box = opened.page.locator(selector).bounding_box()
    clip = {"x": 0, "y": box["y"], "width": opened.page.viewport_size["width"], "height": min(height, box["height"])}
    opened.page.screenshot(path=path, full_page=True, clip=clip)
    opened.close()


if __name__ == "__main__":
    main()
