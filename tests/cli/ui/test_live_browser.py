"""The live page in a real browser: it opens without an error, follows a search, compiles, and says what is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Outcome, Trial
from blocktune.db.store import ResultStore
from tests.cli.ui.conftest import KNOWN, recorded
from tests.support.pages.browser import Page
from tests.support.pages.reports import HOSTILE
from tests.support.stores.bad_stores import overwritten_middle
from tests.support.stores.live_servers import LiveServer, live_server

Add = Callable[[Trial], None]
VIEWS = ("occupancy", "sweeps", "times", "search", "shapes")
WAIT_MS = 30_000
MARKUP = HOSTILE.replace("\x1b", "")  # a database takes no control characters


@pytest.fixture
def page(browser: Any, server: LiveServer) -> Iterator[Page]:
    opened = Page(browser, server.url)
    yield opened
    opened.close()


def wait_for_text(page: Page, selector: str, text: str) -> None:
    page.page.locator(selector).filter(has_text=text).first.wait_for(timeout=WAIT_MS)


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [390, 1440], ids=["phone", "desk"])
def test_every_view_opens_without_an_error_or_a_foreign_request(browser: Any, server: LiveServer, width: int) -> None:
    opened = Page(browser, server.url, width=width)
    assert opened.problems == []
    own = [url for url in opened.requests if not url.startswith(("data:", "blob:"))]
    assert all(url.startswith(server.url) for url in own)
    for view in VIEWS:
        assert opened.page.locator(f"#{view} .chart svg").count() >= 1, view
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert f"{KNOWN} trials" in opened.text("#live")
    opened.close()


def test_a_new_trial_appears_and_the_best_is_followed(page: Page, add: Add) -> None:
    fastest = replace(recorded()[KNOWN], time_us=900.0, relative_to_anchor=0.4)
    assert page.page.evaluate("BT.table.columns.kernel.length") == KNOWN
    page.page.locator("#config-list button").first.focus()
    chart = page.page.evaluate_handle("document.querySelector('#progress-trial svg')")
    add(fastest)
    wait_for_text(page, "#live", f"{KNOWN + 1} trials")
    wait_for_text(page, "#sweep-words", "900.0 µs")
    page.settle()
    assert fastest.config.label in page.text("#config-a h3")
    assert f"of {KNOWN + 1}" in page.text("#config-list")
    assert page.page.evaluate("(svg) => svg.isConnected", chart), "charts get the rows and stay"
    assert page.page.evaluate("document.activeElement.closest('#config-list') !== null"), "the keyboard stays"
    assert page.problems == []


def test_a_config_is_compiled_on_request(page: Page) -> None:
    page.page.locator("#what-if-kernel").select_option("flash_fwd")
    page.page.locator("#what-if-block_m").fill("77")
    page.page.locator("#what-if-form button").click()
    wait_for_text(page, "#what-if-problem", "77")
    page.page.locator("#what-if-block_m").fill("64")
    page.page.locator("#what-if-form button").focus()
    page.page.keyboard.press("Enter")
    page.page.locator("#what-if-jobs [data-state=done]").wait_for(timeout=4 * WAIT_MS)
    text = page.text("#what-if-jobs")
    assert all(word in text for word in ("flash_fwd 64x", "registers", "spilled", "blocks/SM", "predicted"))
    page.page.locator("#what-if-jobs").get_by_role("button", name="Open in the explorer").click()
    assert "Free numbers" in page.text("#occupancy-body")
    page.settle()
    assert [each for each in page.problems if "422" not in each] == []


def test_a_shape_is_picked_by_its_fields(page: Page) -> None:
    page.page.locator("#shape-form summary").click()
    page.page.locator("#shape-seq").fill("8192")
    page.page.locator("#shape-dim").fill("64")
    page.page.locator("#shape-form button").click()
    wait_for_text(page, "#shape-answer", "is shown")
    page.page.locator("#shape-seq").fill("2048")
    page.page.locator("#shape-causal").check()
    page.page.keyboard.press("Enter")
    wait_for_text(page, "#shape-answer", "was not measured")
    wait_for_text(page, "#what-if-form", "s2048 d64 bf16 causal on NVIDIA H200")
    assert page.problems == []


def test_hostile_names_are_inert(browser: Any, tmp_path: Path) -> None:
    db = tmp_path / "hostile.db"
    with ResultStore.open(db) as store:
        failed = Outcome.COMPILE_ERROR
        for trial in recorded()[:3]:
            store.record(replace(trial, device=replace(trial.device, name=MARKUP)))
        bad = replace(recorded()[0], device=replace(recorded()[0].device, name=MARKUP), outcome=failed, error=MARKUP)
        alone = replace(bad.config, block_m=16)
        store.record(replace(bad, config=alone, time_us=None, samples_us=(), relative_to_anchor=None, resources=None))
    with live_server(db) as server:
        opened = Page(browser, server.url)
        assert opened.problems == []
        assert opened.page.locator("img").count() == 0
        assert opened.page.locator("#heat-0 [aria-label*='onerror=alert']").count() > 0, "the reason of the failed cell"
        assert opened.page.locator("body script").count() == 2
        assert MARKUP in opened.text("#sweep-words")
        opened.close()


def test_trouble_with_the_store_is_a_message_in_the_page(page: Page, db: Path) -> None:
    sound = db.read_bytes()
    for path in [path for path in db.parent.iterdir() if path != db]:
        path.unlink()
    overwritten_middle(db)
    wait_for_text(page, "#problem", "is not a sound SQLite database")
    assert "Traceback" not in page.page.content()
    page.page.reload()
    wait_for_text(page, "#problem", "is not a sound SQLite database")
    db.write_bytes(sound)
    wait_for_text(page, "#live", f"{KNOWN} trials")
    page.page.locator("#problem .message").wait_for(state="detached", timeout=WAIT_MS)


@pytest.mark.exhaustive
def test_a_page_without_a_database_waits_for_one(browser: Any, tmp_path: Path) -> None:
    db = tmp_path / "later.db"
    with live_server(db) as server:
        opened = Page(browser, server.url)
        wait_for_text(opened, "#problem", "There is no database")
        assert "as soon as one measures" in opened.text("#more-body")
        with ResultStore.open(db) as store:
            store.put_all(recorded()[:3], [])
        wait_for_text(opened, "#live", "3 trials")
        opened.settle()
        assert opened.page.locator("#heat-0 svg").count() == 1
        assert opened.problems == []
        opened.close()


@pytest.mark.exhaustive
def test_a_server_that_ends_is_a_message_in_the_page(browser: Any, db: Path) -> None:
    with live_server(db) as server:
        opened = Page(browser, server.url)
    wait_for_text(opened, "#problem", "The server does not answer")
    assert f"{KNOWN} trials" in opened.text("#live")
    opened.close()
