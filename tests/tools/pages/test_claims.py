"""No measured figure stands in the prose of the documents: what was measured is generated from files of results/,
between `<!-- results ... -->`, and has tests of its own. Bounds of the code are compared with the code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktune.kernels.hardware.device import device_named
from blocktune.tuner.launches.race import TIE
from blocktune.tuner.measure.protocol import FEW_ROUNDS, RACE_MARGIN, SETTLED, TIE_BAND
from blocktune.tuner.search.finals import CHALLENGER_BAND
from blocktune.tuner.search.verdict import PREDICTED_TIE
from blocktune.tuner.subject.launch import AT_THE_LIMIT
from tools import ROOT
from tools.pages.pages import pages
from tools.pages.recorded.facts import FACTS, fact, over_the_best, sweeps

RESULTS = ROOT / "results"

GENERATED = re.compile(r"<!-- (\w+) [^>]*-->\n.*?<!-- /\1 -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(
    r"\d[\d.,]*(?: (?:µs|us|TFLOP/s|GB/s|TB/s|%)(?!\w)| times (?:as|faster|slower|longer)| (?:W|MHz|GHz)\b)"
    r"|\b\d\.\d{2,}x"
)
"""What reads like a measured figure."""


def prose(page: Path) -> str:
    """A page without what is generated, without code, and with single spaces."""
    return " ".join(CODE.sub("", GENERATED.sub("", page.read_text(encoding="utf-8"))).split())


RULES: tuple[tuple[str, str], ...] = (
    ("docs/guide/own_kernels.md", f"within {100 * (TIE - 1):.1f} % of the fastest"),
    ("docs/guide/own_kernels.md", f"no more than {100 * (AT_THE_LIMIT - 1):.0f} % above the least time"),
    ("docs/how/search.md", f"less than {100 * PREDICTED_TIE:.0f} % ahead of it"),
    ("docs/how/search.md", f"those within {100 * (CHALLENGER_BAND - 1):.0f} % of the best"),
    ("docs/how/search.md", f"the tie band ({100 * TIE_BAND:.1f} %) of the fastest"),
    ("docs/how/search.md", f"by {SETTLED:.0f} standard errors; of fewer than {FEW_ROUNDS} rounds"),
    ("docs/how/search.md", f"is {100 * (RACE_MARGIN - 1):.0f} % slower than the best so far"),
)
"""What a page says of the code's own bounds."""


def spoken_for(page: str) -> Iterator[str]:
    """The parts of a page whose figures are known."""
    yield from (text for name, text in RULES if name == page)


PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_typed_by_hand(page: str) -> None:
    text = prose(ROOT / page)
    for known in spoken_for(page):
        assert known in text, f"{page} no longer says: {known}"
        text = text.replace(known, "")
    assert MEASURED.findall(text) == [], "A measured figure comes from a file of results/: see the top of this test."


def test_every_fact_stands_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages(ROOT))
    assert sorted(set(re.findall(r"<!-- results facts#(\w+) -->", text))) == sorted(FACTS)


def test_defaults_are_counted_as_the_table_of_winners_does() -> None:
    shipped = (ROOT / "docs" / "benchmarks" / "index.md").read_text(encoding="utf-8")
    winners = re.search(r"\| `flash_fwd_hopper` \| (\d+) \|", shipped)
    assert winners is not None
    assert f" of {winners[1]} are the default." in fact("hopper_defaults", RESULTS)


def test_no_sweep_has_a_config_before_its_best() -> None:
    ratios = [over_the_best(sweep, "flash_fwd_hopper") for sweep in sweeps(RESULTS).values()]
    assert min(ratio for ratio in ratios if ratio is not None) == 1


def test_the_backwards_of_the_bench_are_compared_shape_by_shape(tmp_path: Path) -> None:
    bench = json.loads((RESULTS / "h200-passes.bench.json").read_text(encoding="utf-8"))
    for row in bench["rows"]:
        for entry in row["contenders"]:
            if entry["name"] in ("flash_bwd_split", "flash_bwd_fused"):
                entry["timing"]["median_us"] = {"flash_bwd_split": 300.0, "flash_bwd_fused": 400.0}[entry["name"]]
    (tmp_path / "h200-passes.bench.json").write_text(json.dumps(bench), encoding="utf-8")
    said = fact("backward_kernels", tmp_path).splitlines()
    assert said[0].startswith("Timed against each other for 16 shapes, two passes win in 16, and one kernel has 0.75")
    assert said[2:] == ["| shape | two passes | one kernel | Hopper |", "| --- | ---: | ---: | ---: |"]


def test_the_noise_is_that_of_the_sustained_regime(tmp_path: Path) -> None:
    study = json.loads((RESULTS / "h200.noise.json").read_text(encoding="utf-8"))
    study["summary"]["regimes"]["sustained"]["candidates"]["time"] = {"low": 0.93, "high": 1.01}
    study["summary"]["regimes"]["burst"]["duels"] |= {"count": 5, "won": 1}
    study["summary"]["regimes"]["sustained"]["duels"] |= {"count": 5, "won": 1}
    (tmp_path / "h200.noise.json").write_text(json.dumps(study), encoding="utf-8")
    said = fact("noise", tmp_path)
    assert "wander by 7.0 % either way" in said
    assert "no winner in 8 of 10 cases" in said


def test_the_memory_of_decoding_is_the_catalogue_s() -> None:
    gigabytes = device_named("h200").memory_gbs
    assert gigabytes is not None
    moved = 2 * 8 * 8192 * 128 * 2  # keys and values of 8 heads of 8192 keys of 128 elements of 2 bytes
    sentence = f"{moved / 1e6:.1f} MB, {moved / gigabytes / 1e3:.0f} µs at the memory's {gigabytes:.0f} GB/s"
    assert sentence in prose(ROOT / "notes" / "kernels" / "decoding.md")


def test_a_typed_figure_is_seen() -> None:
    assert MEASURED.findall("It took 12.5 µs, 1,005 TFLOP/s, 1.29x, 3 % more and 1.4 times as long at 690 W.") == [
        "12.5 µs",
        "1,005 TFLOP/s",
        "1.29x",
        "3 %",
        "1.4 times as",
        "690 W",
    ]
    assert MEASURED.findall("It waits 30 s for 64 configs of 8192 keys, 16 bytes at a time.") == []
