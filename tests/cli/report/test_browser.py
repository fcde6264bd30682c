"""The report in a real browser: every view opens, sliders and clicks work, the keyboard reaches everything."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktune.db.records.records import Outcome
from blocktune.tuner.lab.sweep_file import load_sweep, save_sweep
from blocktune.tuner.profile.counter_file import CounterFile
from tests.support.pages.browser import Page
from tests.support.pages.reports import DENSE, HOSTILE, RESULTS, SHIPPED, WIDE, hostile_bench, write_report

pytestmark = pytest.mark.xdist_group("report")

VIEWS = ("occupancy", "sweeps", "times", "search", "shapes")


@pytest.fixture(scope="module")
def page(browser: Any, report_file: Path) -> Iterator[Page]:
    opened = Page(browser, report_file)
    yield opened
    opened.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1440, False)], ids=["phone", "desk"])
def test_every_view_opens_without_an_error_or_a_request(
    browser: Any, report_file: Path, width: int, dark: bool
) -> None:
    opened = Page(browser, report_file, width=width, dark=dark)
    assert opened.problems == []
    assert {url.split(":", 1)[0] for url in opened.requests} <= {"file", "data", "blob"}
    for view in VIEWS:
        assert opened.page.locator(f"#{view} .chart svg").count() >= 1, view
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    widest = opened.page.evaluate(
        "Math.max(...[...document.querySelectorAll('table')].map((each) => each.scrollWidth))"
    )
    assert widest <= width, "a table of a phone shows all of its cells without a scroll"
    assert opened.page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    opened.close()


def test_the_first_paint_comes_at_once(page: Page) -> None:
    """In one of three loads at least: other tests have the processors, too."""

    def painted_ms() -> float:
        page.page.reload()
        page.settle()
        return page.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")

    assert any(painted_ms() < 1000 for _ in range(3))


def test_a_slider_changes_the_blocks(page: Page) -> None:
    slider = page.page.locator("#slide-shared_bytes")
    slider.fill("0")
    page.page.locator("#slide-registers").fill("32")
    page.page.locator("#slide-num_warps").fill("4")
    assert page.text("#answer-A .big") == "16 blocks/SM"
    slider.fill("115712")
    assert page.text("#answer-A .big") == "2 blocks/SM"
    assert page.text("#answer-A .next") == "−38,912 B of shared memory → 3 blocks"
    page.page.locator("#gpu-A").select_option(label="NVIDIA A100-SXM4-40GB (8.0)")
    assert page.text("#answer-A .big") == "1 block/SM"
    page.settle()
    for resource in ("registers", "shared", "warps", "stages", "carveout"):
        assert page.page.locator(f"#curve-{resource} .mark-line path").count() == 2
    page.page.locator("#gpu-A").select_option(label="NVIDIA H200 (9.0)")


def test_the_largest_tile_with_two_blocks_is_named(page: Page) -> None:
    row = page.page.locator("#largest-tiles tbody tr").nth(1).locator("td").all_inner_texts()
    assert row[:2] == ["2", "128 x 128"]


def test_a_click_compares_a_cell_and_says_why_it_is_slow(page: Page) -> None:
    cell = page.page.locator("#heat-0 [aria-label*='config: flash_fwd_hopper 256x128 w4 s4']").first
    cell.scroll_into_view_if_needed()
    page.settle()  # views that come into sight are drawn then, and move what is below
    cell.click(force=True)
    page.settle()
    panel = page.text("#config-a")
    page.page.locator("#heat-0").get_by_text("A", exact=True).first.wait_for()
    assert "flash_fwd_hopper 256x128 w4 s4" in panel
    assert "spilled to memory" in panel
    assert "triton.Config({'BLOCK_M': 256, 'BLOCK_N': 128" in panel
    assert "A, flash_fwd_hopper 256x128" in page.text("#times-body")


def test_the_pointer_shows_resources_and_samples(page: Page) -> None:
    page.page.locator("#heat-0 [aria-label*='config: flash_fwd_hopper 192x128 w4 s3']").first.hover(force=True)
    tip = page.page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert all(word in tip.inner_text() for word in ("measured", "rounds", "predicted", "registers", "blocks/SM"))


def test_counters_stand_next_to_the_predictions(page: Page) -> None:
    rows = page.page.locator("#times-body table tbody tr").all_inner_texts()
    cells = {row.split("\t")[0]: row.split("\t")[1:4] for row in rows}
    assert cells["time"][1] == "2,500.0 µs"
    assert float(cells["time"][2]) == pytest.approx(
        float(cells["time"][0].split()[0].replace(",", "")) / 2500, abs=0.01
    )
    assert page.page.locator("#counter-ratios .mark-symbol path").count() == len(rows)
    assert page.page.locator("#stall-reasons .mark-rect path").count() == 5
    assert "Made-up GPU like an H200" in page.text("#counter-words")


def test_what_was_counted_is_a_point_under_the_roofs(browser: Any, tmp_path: Path) -> None:
    counters = SHIPPED / "h200-flash_fwd.counters.csv"
    opened = Page(browser, write_report(tmp_path / "counted.html", DENSE, counters))
    found = CounterFile.read(counters)
    counted = {row.name: row.counted for row in found.rows()}
    (point,) = [each for each in opened.page.evaluate("BT.points(BT.pair())") if each["group"] == "counters"]
    moved = counted["read from DRAM"] + counted["written to DRAM"]
    assert point["intensity"] == pytest.approx(found.analysis.shape.flops / moved)
    assert point["tflops"] == pytest.approx(found.analysis.shape.flops / counted["time"] / 1e6)
    assert (point["name"], point["kind"]) == ("flash_fwd", "measured")
    assert opened.page.locator("#roofline").get_by_text("device memory, counted").count() == 1
    opened.close()


def ladder_file(folder: Path, direction: str, *, predicted: bool) -> Path:
    """The shipped ladder of the forward, alone; of another direction and as if nothing had been measured."""
    document = json.loads((SHIPPED / "h200.ladder.json").read_text())
    row = next(row for row in document["rows"] if row["shape"]["direction"] == "forward")
    row["shape"]["direction"] = direction
    if predicted:
        row["origin"] = "predicted"
        for number, step in enumerate(row["steps"]):
            step |= {"timing": None, "predicted_us": 1000.0 / (1 + number)}
    path = folder / f"{direction}.ladder.json"
    path.write_text(json.dumps(document | {"rows": [row]}))
    return path


def test_predicted_steps_are_dashed_and_measured_ones_come_first(browser: Any, tmp_path: Path) -> None:
    kinds = {"forward": False, "backward": True}
    ladders = [ladder_file(tmp_path, direction, predicted=predicted) for direction, predicted in kinds.items()]
    report = write_report(tmp_path / "both.html", *ladders, RESULTS / "h200-passes.bench.json")
    opened = Page(browser, report)
    forward = "b2 h32 s8192 d64 bf16"
    assert opened.page.locator("#shapes-body h4").all_inner_texts() == [
        f"{label} on NVIDIA H200" for label in (forward, f"{forward} backward", f"{forward} backward")
    ]
    assert opened.page.locator("#shapes-body h4 + p").all_inner_texts() == [
        "Measured: solid; predicted: hollow.",
        "Measured by h200-passes.bench.json: solid; predicted: hollow.",
        "Predicted by the models, nothing was measured: dashed.",
    ]
    heads = [table.all_inner_texts() for table in opened.page.locator("#shapes-body thead").all()]
    assert ["time" in head[0] for head in heads[:3]] == [True, True, False]
    dashes = [
        opened.page.locator(f"#ladder-{number} .mark-rect path[stroke-dasharray='5,3']").count() for number in range(3)
    ]
    assert dashes == [0, 0, 9]
    opened.close()


def test_a_measured_ladder_of_a_backward_stands_for_that_of_a_bench(browser: Any, tmp_path: Path) -> None:
    ladder = ladder_file(tmp_path, "backward", predicted=False)
    opened = Page(browser, write_report(tmp_path / "one.html", ladder, RESULTS / "h200-passes.bench.json"))
    assert opened.page.locator("[id^=ladder-]").count() == 1
    assert opened.page.evaluate("BT.climbs()[0].origin") == "measured"
    opened.close()


def test_a_bench_of_backwards_is_a_ladder(browser: Any, tmp_path: Path) -> None:
    opened = Page(browser, write_report(tmp_path / "backward.html", RESULTS / "h200-passes.bench.json"))
    assert opened.problems == []
    steps = [row.split("\t")[0] for row in opened.page.locator("#shapes-body table tbody tr").all_inner_texts()]
    assert steps == ["two passes", "one pass", "hopper"]
    assert opened.page.locator("#ladder-0 .mark-rect path").count() == 2 * len(steps), "a bar and a tick each"
    assert "Measured by h200-passes.bench.json" in opened.text("#shapes-body")
    opened.close()


def test_whether_the_card_was_throttled_is_one_sentence(page: Page) -> None:
    assert page.text("#throttled").startswith("Throttled: at the power limit in 574 of 576 trials.")


def test_a_brush_selects_in_the_other_views(page: Page) -> None:
    assert page.page.evaluate("BT.brush('flash_fwd', {block_m: [128], block_n: [64]}) ?? BT.state.brush.size") > 0
    page.settle()
    assert "brushed" in page.text("#search-body")
    rows = page.page.locator("#config-list tbody tr").all_inner_texts()
    assert rows
    assert all("flash_fwd 128x64" in row for row in rows)
    page.page.get_by_role("button", name="Show all configs again").click()
    page.settle()


def test_another_sweep_shows_hatched_cells_with_their_reason(page: Page) -> None:
    page.page.locator("#sweep").select_option(index=1)
    page.page.wait_for_timeout(200)
    page.settle()
    assert "b4 h8 s4096 d256" in page.text("#sweeps-body")
    labels = page.page.locator("#heat-0 [aria-label*='not timed']")
    assert labels.count() > 0
    page.page.locator("#sweep").select_option(index=0)
    page.page.wait_for_timeout(200)
    page.settle()
    assert page.problems == []


def test_the_keyboard_reaches_every_control(page: Page) -> None:
    unreachable = page.page.evaluate(
        "[...document.querySelectorAll('button, select, input, a, summary')].filter((each) => each.tabIndex < 0).length"
    )
    assert unreachable == 0
    nameless = page.page.evaluate(
        "[...document.querySelectorAll('button, select, input')].filter((each) => "
        "!(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length)).length"
    )
    assert nameless == 0
    page.page.locator("#slide-registers").focus()
    before = page.text("#slide-registers >> xpath=../span/output")
    page.page.keyboard.press("ArrowRight")
    assert page.text("#slide-registers >> xpath=../span/output") != before
    page.page.locator("#config-list button").nth(2).focus()
    page.page.keyboard.press("Enter")
    page.settle()
    assert page.page.locator("#config-list button").nth(2).get_attribute("aria-pressed") == "true"


def test_hostile_names_are_inert(browser: Any, tmp_path: Path) -> None:
    opened = Page(browser, write_report(tmp_path / "hostile.html", hostile_bench(tmp_path)))
    assert opened.problems == []
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("body script").count() == 3  # the data, Vega and the page's own
    assert HOSTILE.replace("\x1b", "\\x1b") in opened.text("#bench-words")
    opened.close()


def test_views_without_data_are_no_frames_and_the_end_says_what_would_fill_them(browser: Any, tmp_path: Path) -> None:
    opened = Page(browser, write_report(tmp_path / "bare.html", RESULTS / "h200.noise.json"))
    assert opened.problems == []
    for view in ("sweeps", "times", "search"):
        assert not opened.page.locator(f"#{view}").is_visible()
        assert not opened.page.locator(f"nav a[href='#{view}']").is_visible()
    assert opened.page.locator("main .message").count() == 1  # that no winner is there
    assert [opened.text("#more-body").count(word) for word in ("tune run", "tune profile", "tune bench")] == [2, 1, 1]
    assert "blocks/SM" in opened.text("#answer-A")
    opened.close()


def test_a_sweep_without_a_time_says_why(browser: Any, tmp_path: Path) -> None:
    sweep = load_sweep(WIDE)
    failed = tuple(trial for trial in sweep.trials if trial.outcome is not Outcome.OK)
    opened = Page(browser, write_report(tmp_path / "failed.html", save_sweep(replace(sweep, trials=failed), tmp_path)))
    assert opened.problems == []
    for view in ("sweeps", "times", "search"):
        assert "No config of b4 h8 s4096 d256 bf16 causal has a time: compile error." in opened.text(f"#{view}-body")
    opened.close()


def test_it_prints_in_dark_ink(browser: Any, report_file: Path) -> None:
    opened = Page(browser, report_file, dark=True)
    opened.page.emulate_media(media="print", color_scheme="light")
    opened.page.wait_for_timeout(100)
    opened.settle()
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert opened.problems == []
    opened.close()


def test_the_search_says_which_parameters_matter(page: Page) -> None:
    page.page.locator("#search").scroll_into_view_if_needed()
    page.settle()
    assert "Parameters that matter" in page.text("#search-body")
    assert page.page.locator("#importance [aria-label*='parameter: block_m']").count() == 1
