"""What a person who never read the documentation finds with a mouse: the clicks of docs/guide/explaining.md."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages.browser import STEP_MS, TRIES, Page

pytestmark = pytest.mark.xdist_group("report")

SLOW_TILE = "#heat-0 [aria-label*='config: flash_fwd_hopper 256x128 w4 s4']"


@pytest.fixture(scope="module", params=[1440, 390], ids=["desk", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, report_file: Path) -> Iterator[Page]:
    opened = Page(browser, report_file, width=request.param)
    yield opened
    assert opened.problems == []
    opened.close()


def go_to(page: Page, link: str, view: str) -> None:
    """Click a link at the top and wait until its view is in sight."""
    page.page.get_by_role("navigation").get_by_role("link", name=link, exact=True).click()
    for _ in range(TRIES):
        if abs(page.page.locator(f"#{view}").bounding_box()["y"]) < page.page.viewport_size["height"] / 2:
            return
        page.page.wait_for_timeout(STEP_MS)  # it scrolls smoothly
    raise AssertionError(f"the link {link} must lead to its view")


def click_at(page: Page, selector: str) -> None:
    """Click where a person sees an element, whatever lies on top of it."""
    target = page.page.locator(selector).first
    target.scroll_into_view_if_needed()
    before = None
    while (box := target.bounding_box()) != before:
        before = box
        page.page.wait_for_timeout(STEP_MS)
    page.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.settle()


@pytest.mark.few(1)
def test_the_largest_tile_that_keeps_two_blocks_on_an_h200(page: Page) -> None:
    go_to(page, "Occupancy", "occupancy")
    assert "NVIDIA H200" in page.text("#gpu-A option:checked")
    assert "keep a number of blocks on NVIDIA H200" in page.text("#largest-tiles caption")
    head = page.page.locator("#largest-tiles thead th").all_inner_texts()
    row = page.page.locator("#largest-tiles tbody tr").nth(1).locator("td").all_inner_texts()
    answer = dict(zip(head, row, strict=True))
    assert (answer["blocks/SM at least"], answer["tile"]) == ("2", "128 x 128")


@pytest.mark.few(1)
def test_why_256_by_128_is_slow(page: Page) -> None:
    go_to(page, "Sweep", "sweeps")
    click_at(page, SLOW_TILE)
    line = page.page.locator("#picked-words")
    assert line.inner_text().startswith("A: flash_fwd_hopper 256x128 w4 s4")
    assert "2.85 times the time of the best." in line.inner_text()
    place, height = line.bounding_box(), page.page.viewport_size["height"]
    assert 0 <= place["y"] <= height - place["height"], "in sight without scrolling"
    line.get_by_role("link").click()
    panel = page.text("#config-a")
    assert panel.startswith("A: flash_fwd_hopper 256x128 w4 s4")
    assert "2.85 times the time of the best. It has no room for its tiles in registers:" in panel
    assert re.search(r"[1-9][\d,]* B per thread are spilled to memory", panel)


@pytest.mark.few(2)
def test_whether_the_card_was_throttled(page: Page) -> None:
    go_to(page, "Search", "search")
    assert page.text("#throttled") == (
        "Throttled: at the power limit in 574 of 576 trials. Neither heat nor a fault slowed it. "
        "The power limit is 700 W."
    )
    assert page.page.locator("#throttled").is_visible()
