"""Six rows of a bench, and its picture."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.tools.pages.test_readme_results import DOCUMENT, entry, row
from tools.pages.bench_summary import summary
from tools.pages.bench_tables import NOTHING
from tools.pages.pages import with_results
from tools.pages.pictures.speed_picture import LINES, speed_picture

SVG = "{http://www.w3.org/2000/svg}"


def timed(seq: int, dim: int, causal: bool, tflops: float) -> dict[str, Any]:
    return row(seq, dim, causal, entry("tuned", tflops), entry("cudnn", 500.0), entry("fa2", 250.0))


BENCH = DOCUMENT | {
    "rows": [
        timed(16384, 64, True, 600.0),
        timed(1024, 128, True, 500.0),
        timed(1024, 64, True, 400.0),
        timed(1024, 64, False, 450.0),
        timed(2048, 64, True, 550.0),
    ]
}


def test_the_summary_has_causal_rows_of_three_lengths_in_order() -> None:
    _, _, *lines = [line for line in summary(BENCH).splitlines() if line.startswith("| ")]
    assert lines == [
        "| 64 | 1024 | 500 | 250 | 400 | 0.800 (0.900 to 1.100), cuDNN |",
        "| 64 | 16384 | 500 | 250 | 600 | 1.200 (0.900 to 1.100), cuDNN |",
        "| 128 | 1024 | 500 | 250 | 500 | 1.000 (0.900 to 1.100), cuDNN |",
    ]


def test_the_means_of_the_summary_are_those_of_all_rows() -> None:
    means = "0.990 over the fastest rival (5 shapes); 0.990 over cuDNN (5 shapes); 1.980 over FlashAttention-2"
    assert means in summary(BENCH)
    # (0.8 * 0.9 * 1.0 * 1.1 * 1.2) ** (1 / 5)


def test_the_summary_begins_with_who_is_missing_and_names_the_software() -> None:
    caption = summary(BENCH).splitlines()[0]
    assert caption.startswith("Measured without FlashAttention-3 and FlashAttention-4. NVIDIA H200, ")
    peers = {"fa3": "fa3-fwd 0.0.3", "fa4": "flash-attn-4 4.0.0"}
    rows = [row(1024, 64, True, entry("tuned", 400.0), *(entry(name, 300.0) for name in ("cudnn", "fa3", "fa4")))]
    text = summary(DOCUMENT | {"rows": rows, "environment": DOCUMENT["environment"] | {"peers": peers}})
    assert "Measured without" not in text
    assert "fa3-fwd 0.0.3, flash-attn-4 4.0.0)" in text.splitlines()[0]
    assert "| FA3 | FA4 |" in text


def test_a_page_asks_for_the_summary_by_its_name(tmp_path: Path) -> None:
    page = "<!-- results none.bench.json#summary -->\nold\n<!-- /results -->"
    assert NOTHING in with_results(page, tmp_path)


def lines_of(panel_rows: list[dict[str, Any]]) -> dict[str, list[list[tuple[float, float]]]]:
    """The points of every line of a picture, by colour."""
    drawn = ElementTree.fromstring(speed_picture(DOCUMENT | {"rows": panel_rows}))
    points: dict[str, list[list[tuple[float, float]]]] = {}
    for line in drawn.iter(f"{SVG}polyline"):
        pairs = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        points.setdefault(line.attrib["stroke"], []).append(pairs)  # type: ignore[arg-type]
    return points


def test_the_picture_has_a_panel_for_each_head_dimension_and_mask() -> None:
    drawn = ElementTree.fromstring(speed_picture(BENCH))
    texts = [element.text for element in drawn.iter(f"{SVG}text")]
    assert [text for text in texts if text and text.startswith("head_dim")] == [
        "head_dim 64, full",
        "head_dim 64, causal",
        "head_dim 128, causal",
    ]
    assert {LINES[name][0] for name in ("tuned", "cudnn", "fa2")} <= set(texts)
    assert not {LINES[name][0] for name in ("fa3", "fa4")} & set(texts), "they were not timed"


def test_higher_is_faster_and_equal_rates_have_equal_heights() -> None:
    points = lines_of([timed(1024, 64, True, 250.0), timed(4096, 64, True, 500.0)])
    ours, cudnn, fa2 = (points[LINES[name][1]][0] for name in ("tuned", "cudnn", "fa2"))
    assert ours[0] == fa2[0]
    assert ours[1] == cudnn[1]
    assert ours[1][1] < ours[0][1], "y grows downwards in a picture"


def test_lengths_stand_in_proportion_to_their_logarithm() -> None:
    points = lines_of([timed(seq, 64, True, 300.0) for seq in (1024, 2048, 8192)])
    first, second, third = (x for x, _ in points[LINES["tuned"][1]][0])
    assert round((third - first) / (second - first), 2) == 3


def test_a_contender_that_was_not_timed_has_no_point() -> None:
    missing = row(4096, 64, True, entry("tuned", 500.0), entry("cudnn", 1.0, timing=None, problem="no kernel"))
    points = lines_of([timed(1024, 64, True, 400.0), missing])
    assert [len(points[LINES[name][1]][0]) for name in ("tuned", "cudnn", "fa2")] == [2, 1, 1]
